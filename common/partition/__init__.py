"""Who holds what: splits, feature shift, plan files."""
