"""Options: what users may say, declared once."""
