"""`posttrain demo`: the run of recipes/tiny_search.yaml, watched: a live table, a plot, episodes before and after."""
