"""Its presence lets tests in the rooms of this folder import what lies here."""
