"""Which runs a site takes part in: what a person there is asked, and what is remembered of the answer."""
