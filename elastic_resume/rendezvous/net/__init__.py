"""The rendezvous over TCP: wire protocol, connections, event loop and disk around the state machine."""
