//! Elastic quotas: decides which pods are within a guarantee, which pods borrow, and which pods are
//! evicted.
//!
//! A quota guarantees an amount of one pool of GPUs. Pods of other quotas may borrow the unused
//! part that the quota lends, up to their own quota's maximum. A pod within its quota's guarantee
//! reclaims GPUs from borrowing pods of other quotas. Quotas share unused GPUs by weight.
//!
//! | module | what |
//! |---|---|
//! | `amount` | amounts of GPUs or of memory, and the cost of requests |
//! | `spec` | quotas as users write them, and their validated limits |
//! | `world` | the pods, GPUs and quotas of a pool |
//! | `class` | classes of pods, shares of quotas, and the order of pods in a quota |
//! | `cells` | classes and ownership of GPUs for `guarantee: Cells` |
//! | `gang` | pods that are released, counted and evicted together |
//! | `pack` | GPUs for several pods at once |
//! | `book` | use and rights of quotas, for callers that place pods themselves |
//! | `account` | the amount that each quota uses, and the class of each pod |
//! | `room` | free and nominated capacity of each GPU |
//! | `state` | accounts and GPUs together, while a pass changes them |
//! | `exchange` | which pods to evict so that another pod fits |
//! | `gang_exchange` | which pods to evict so that a gang fits |
//! | `rights` | whether a set of victims may be evicted |
//! | `ageing` | reservations for pods that have waited long |
//! | `look` | one pass over the waiting pods |
//! | `simulate` | passes until nothing changes |
//!
//! Every result depends only on the pods, GPUs, quotas, settings and time that the caller passes
//! in. No state is kept between passes, so a restart changes nothing.
mod account;
mod ageing;
mod amount;
mod book;
mod cells;
mod class;
mod exchange;
mod gang;
mod gang_exchange;
mod look;
mod pack;
mod rights;
mod room;
mod simulate;
mod spec;
mod state;
#[cfg(test)]
mod tests;
mod world;

pub use amount::{Amount, GPU, MigSlice, Requested, charge_per_gpu};
pub use book::{Book, Rights, Turn, Usage};
pub use class::{Class, Share};
pub use exchange::Kind;
pub use gang::MAX_GANG_PODS;
pub use look::{Exchange, Outcome, Released, Wait, look, reserved_for_long_waits};
pub use simulate::{Leave, Rest, Restless, simulate};
pub use spec::{Guarantee, InvalidQuota, Mode, Namespaces, Quota, QuotaSpec, Unit};
pub use world::{Gang, Owner, Piece, Place, Pod, PodId, Settings, World};
