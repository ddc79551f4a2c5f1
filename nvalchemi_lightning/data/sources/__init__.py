"""Files and stores as sources of structures, in eV and A whatever their dialect."""
