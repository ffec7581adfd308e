"""Membership of the job: a pure state machine, the network around it, and the client that the agent uses."""
