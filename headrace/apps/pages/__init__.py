"""The pages of a run and of a plan: one HTML file each, drawn from the files of the run directory."""
