//! Replaces MPS hosts of an older release when nothing uses MPS on their node. Disabled unless
//! configured.
//!
//! When an MPS host's pod stops, its MPS daemons and all of their clients stop. So the `DaemonSet`
//! has the strategy `OnDelete`: it replaces a pod only after the pod's deletion. The operator
//! deletes the pod only while no pod has MPS shares on the node or a reservation for them. The
//! state of an MPS host decides what happens:
//!
//! - It has its `DaemonSet`'s newest revision and serves: it is kept.
//! - It has an older revision, and a pod uses MPS or the agent is outdated too: it is kept.
//! - It has an older revision and is unused: no MPS shares are reserved on its node. If it is still
//!   unused after `decide::IDLE_TIME`, its pod is deleted.
//! - It is terminating, absent or not ready: no MPS shares are reserved on its node, for at most
//!   `decide::START_TIMEOUT`. Other MPS hosts are replaced once it has served for
//!   `decide::STEADY_TIME`.
//! - It does not serve within `decide::START_TIMEOUT`: replacement stops until it serves or its
//!   `DaemonSet` changes. An Event reports the stop.
//!
//! | step | module | what |
//! |---|---|---|
//! | read | `hosts`, `view` | pods and revisions, and the state of MPS on each node |
//! | decide | `decide` | [`Step`]: the pods to delete now |
//! | apply | `replace` | the deletion, by UID |
//!
//! The decision is part of placement's reconcile ([`crate::placement`]). So nothing is reserved
//! between the moment a node is found idle and the moment it is closed. [`Rollout`] remembers only
//! its own actions and times. Each update reads again which MPS hosts are outdated, terminating or
//! not ready, so a new leader can continue.
mod decide;
mod hosts;
mod replace;
mod view;

pub(crate) use decide::{Replacement, Step};
pub(crate) use decide::{Rollout, UPDATE_INTERVAL};
pub(crate) use hosts::{MpsHostStores, NewestRevisions, mps_hosts_by_node};
pub(crate) use hosts::{MpsHosts, Revision};
pub(crate) use replace::{DeletionResult, replace};
pub(crate) use view::{MpsHostView, MpsState, may_be_down, pending_users};
