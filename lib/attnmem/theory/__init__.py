"""All else that is proved, built or certified."""
