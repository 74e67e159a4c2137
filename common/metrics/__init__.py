"""What a model is judged by: numbers made of sums over examples, so that batches and sites add up."""
