"""Copy the state into slots while training continues."""
