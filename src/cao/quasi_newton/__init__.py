"""Line search, memory and objective of the quasi-Newton method."""
