"""Learning rates swept: how an optimizer and its base fare at each of them, on small problems of many kinds."""
