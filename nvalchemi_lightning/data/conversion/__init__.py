"""Converting sources to stores."""
