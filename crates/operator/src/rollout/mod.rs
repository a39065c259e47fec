//! Replaces MPS hosts of an older release when nothing uses MPS on their node. Off unless
//! configured.
//!
//! An MPS daemon ends with its host's pod, and every client with the daemon. So the `DaemonSet`
//! replaces a pod only after somebody deletes it (`OnDelete`). The operator deletes it while no pod
//! has shares on the node or a reservation for some.
//!
//! | an MPS host | result |
//! |---|---|
//! | of the newest revision of its `DaemonSet`, serving | It stays. |
//! | of an older revision, and a pod uses MPS, or the agent is of an older revision too | It stays. |
//! | of an older revision, unused | Nothing new is reserved there. If that is still so after `decide::SETTLE`, its pod is deleted. |
//! | terminating, absent or not ready | Nothing is reserved there, for at most `decide::PATIENCE`. Others are replaced after it has served for `decide::STEADY`. |
//! | not serving within `decide::PATIENCE` | No more hosts are replaced, and an Event says so, until it serves or its `DaemonSet` changes. |
//!
//! | step | module | what |
//! |---|---|---|
//! | read | `hosts`, `view` | pods and revisions, and what each node says of MPS |
//! | decide | `decide` | [`Step`]: the pods to delete now |
//! | apply | `replace` | the deletion, by UID |
//!
//! The decision is part of placement's look ([`crate::placement`]), so that nothing is reserved
//! between the moment a node is found idle and the moment it is closed. [`Rollout`] remembers only
//! times. Which hosts are outdated, terminating or not ready is read in each look, so an operator
//! that takes over continues.
mod decide;
mod hosts;
mod replace;
mod view;

pub(crate) use decide::{PERIOD, Rollout};
pub(crate) use decide::{Replacement, Step};
pub(crate) use hosts::{Hosts, Revision};
pub(crate) use hosts::{Newest, Watched, by_node};
pub(crate) use replace::{Deleted, replace};
pub(crate) use view::{Mps, View, is_excused, on_the_way};
