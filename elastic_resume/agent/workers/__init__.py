"""The processes between the agent and the script: launcher shim, worker supervisor, fork server."""
