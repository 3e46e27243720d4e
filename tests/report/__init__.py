"""The report: what it reads, what it draws, what its page says."""
