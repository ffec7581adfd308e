"""The rendezvous over TCP: sockets, clock and disk around the pure core."""
