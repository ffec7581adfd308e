"""The rendezvous in simulated time: seeded schedules of faults against the real core, with named checkers."""
