"""Several machines share one model: by ranges of every unit, or by stages of blocks."""
