"""What a pass over the model does, in order: one file for each kind of pass. Each gives its operations to the ledger."""
