"""What a script holds: er.resume, Run and DDP."""
