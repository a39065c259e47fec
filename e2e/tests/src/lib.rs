//! Tests on the local Kubernetes cluster.
