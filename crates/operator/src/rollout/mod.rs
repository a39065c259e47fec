//! Replaces MPS hosts of an older release when nothing uses MPS on their node. Replacement is
//! disabled by default.
//!
//! When an MPS host's pod stops, its MPS daemons and all of their clients stop. So the `DaemonSet`
//! has the strategy `OnDelete`: it replaces a pod only after the pod's deletion. The operator
//! deletes the pod only while no pod has MPS shares on the node or a reservation for them. The
//! action depends on the state of the MPS host:
//!
//! - The MPS host has its `DaemonSet`'s newest revision and serves: the operator keeps the MPS
//!   host.
//! - The MPS host has an older revision, and a pod uses MPS or the agent is also outdated: the
//!   operator keeps the MPS host.
//! - The MPS host has an older revision and is unused: the operator closes the node and reserves no
//!   MPS shares there. If the MPS host is still unused after `decide::IDLE_TIME`, the operator
//!   deletes its pod.
//! - The MPS host is terminating, absent or not ready: for at most `decide::START_TIMEOUT`, the
//!   operator reserves no MPS shares on the node. The operator replaces other MPS hosts once this
//!   MPS host has served for `decide::STEADY_TIME`.
//! - The MPS host does not serve within `decide::START_TIMEOUT`, and its node is neither
//!   unreachable nor cordoned: replacement stops until the MPS host serves or its `DaemonSet`
//!   changes. An Event reports the stop.
//!
//! | step | module | purpose |
//! |---|---|---|
//! | read | `hosts`, `view` | pods and revisions, and the state of MPS on each node |
//! | decide | `decide` | [`RolloutStep`]: the pods to delete now |
//! | apply | `replace` | the deletion, by UID |
//!
//! The decision is part of placement's reconcile ([`crate::placement`]). So the operator reserves
//! nothing between the check that a node is idle and the closing of the node. [`Rollout`] remembers
//! only its own actions and reports, and when outages began and ended. Each update reads again
//! which MPS hosts are outdated, terminating or not ready, so a new leader can continue.
mod decide;
mod hosts;
mod replace;
mod view;

pub(crate) use decide::{Replacement, RolloutStep};
pub(crate) use decide::{Rollout, UPDATE_INTERVAL};
pub(crate) use hosts::{MpsHostStores, NewestRevisions, mps_hosts_by_node};
pub(crate) use hosts::{MpsHosts, Revision};
pub(crate) use replace::{DeletionResult, replace};
pub(crate) use view::{MpsHostView, MpsState, may_be_down, pending_users};
