"""What samples and rows are: values, messages, how they are packed and mixed."""
