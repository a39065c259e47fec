//! The kubelet's device plugin v1beta1 and PodResources v1 protocols.
