"""What `doctor` does: facts collected by processes with a deadline, and rules on these facts."""
