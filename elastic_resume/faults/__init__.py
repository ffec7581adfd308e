"""Breaking a job on purpose: simulated nodes and what can befall them."""
