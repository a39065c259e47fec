//! Elastic quotas: decides which pods a quota guarantees, which borrow, and which must leave.
//!
//! A quota guarantees an amount of one pool of GPUs. What is unused may be borrowed, up to the
//! borrower's maximum. A pod within its quota's guarantee reclaims room from borrowers of other
//! quotas. Borrowers share what is left by weight.
//!
//! | module | what |
//! |---|---|
//! | `amount` | amounts of GPUs or of memory, and what a request costs |
//! | `spec` | a quota as people write it, parsed once |
//! | `world` | the pods, GPUs and quotas of a pool |
//! | `class` | classes of pods, shares of quotas, and the order of pods in a quota |
//! | `cells` | classes and ownership of GPUs for `guarantee: Cells` |
//! | `gang` | pods that are released, counted and evicted together |
//! | `pack` | GPUs for several pods at once |
//! | `book` | accounts, for callers that place pods themselves |
//! | `account` | what each quota uses, and the class of each pod |
//! | `room` | free room of each GPU, and room that is nominated |
//! | `state` | accounts and room together, while a pass changes them |
//! | `exchange` | which pods leave so that another fits |
//! | `gang_exchange` | which pods leave so that a gang fits |
//! | `rights` | whether these pods may leave |
//! | `ageing` | which pods have waited so long that room is reserved for them |
//! | `look` | one pass over the waiting pods |
//! | `simulate` | passes until nothing changes |
//!
//! Everything is a function of the pods, GPUs and quotas that the caller passes in. No counter
//! survives a pass, so a restart changes nothing.
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
pub use world::{Gang, Owner, Place, Pod, PodId, Settings, World};
