"""One module for each tracking service, imported only if the experiment names it."""
