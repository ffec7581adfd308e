"""What tests share: simulators, simulated machines, and what several of them say alike."""
