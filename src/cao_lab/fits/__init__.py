"""The suite `fits`: least-squares problems of others, solved by `cao.fit` and by other libraries under one bill."""
