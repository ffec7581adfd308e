"""What all ranks of a job share: their connection, and the context of one rank."""
