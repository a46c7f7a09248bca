"""Ways in which tokens read from each other, other than softmax attention: one file for each."""
