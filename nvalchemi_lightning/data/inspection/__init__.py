"""Looking at data: counts, distributions, reference energies, pictures."""
