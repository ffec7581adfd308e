"""The rendezvous as a pure state machine: (event, time) in, effects out."""
