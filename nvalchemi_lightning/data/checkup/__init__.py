"""What is wrong with data sets: a table of checks that look at every structure once, and at the whole in the end."""
