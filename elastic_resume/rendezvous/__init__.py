"""Who is in the world: a pure state machine, the network around it, and the client that the agent holds."""
