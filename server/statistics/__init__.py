"""Do the sites hold the same data? Sums over their examples, added up, and which sites are far from the others."""
