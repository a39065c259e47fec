//! Replaces MPS hosts of an older release when nothing uses MPS on their node. Disabled unless
//! configured.
//!
//! When a host's pod stops, its MPS daemons and all of their clients stop. So the `DaemonSet`
//! replaces a pod only after it is deleted (`OnDelete`). The operator deletes it only while no pod
//! has MPS shares on the node or a reservation for them. The state of an MPS host decides what
//! happens:
//!
//! - It has its `DaemonSet`'s newest revision and serves: it stays.
//! - It has an older revision, and a pod uses MPS or the agent is outdated too: it stays.
//! - It has an older revision and is unused: nothing new is reserved there. If it is still unused
//!   after `decide::SETTLE`, its pod is deleted.
//! - It is terminating, absent or not ready: nothing is reserved there, for at most
//!   `decide::PATIENCE`. Other hosts are replaced after it has served for `decide::STEADY`.
//! - It does not serve within `decide::PATIENCE`: replacement stops until it serves or its
//!   `DaemonSet` changes. An Event reports the stop.
//!
//! | step | module | what |
//! |---|---|---|
//! | read | `hosts`, `view` | pods and revisions, and the state of MPS on each node |
//! | decide | `decide` | [`Step`]: the pods to delete now |
//! | apply | `replace` | the deletion, by UID |
//!
//! The decision is part of placement's update ([`crate::placement`]), so that nothing is reserved
//! between the moment a node is found idle and the moment it is closed. [`Rollout`] remembers only
//! times. Each update reads again which hosts are outdated, terminating or not ready, so a new
//! leader can continue.
mod decide;
mod hosts;
mod replace;
mod view;

pub(crate) use decide::{PERIOD, Rollout};
pub(crate) use decide::{Replacement, Step};
pub(crate) use hosts::{Hosts, Revision};
pub(crate) use hosts::{Newest, Watched, by_node};
pub(crate) use replace::{Deleted, replace};
pub(crate) use view::{Mps, View, is_excused, pending_users};
