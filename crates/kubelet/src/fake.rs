//! A fake kubelet on real unix sockets, for tests and benchmarks.
