//! Ending programs through MPS before the kernel kills them for the machine's memory, where the policy says so.
//!
//! A container at its `resources.limits.memory` is killed without a word, and with a kernel in flight that breaks its neighbours. So a container
//! that has MPS clients gets a `memory.high` a little below its `memory.max`: beyond it the kernel slows down whoever allocates, and says so in
//! `memory.events`. If what is used can then not be reclaimed, its clients are ended as those of a pod that leaves are, and `memory.high` is taken
//! back: what comes next breaks nobody.
//!
//! ```text
//!  main loop ── Scene: clients ─┐                                            ┌─▶ memory.high
//!  /proc/PID/cgroup ────────────┼─▶ Guards, with Figures (pure) ─────────────┼─▶ MPS host: terminate
//!  memory.events, by inotify ───┘                                            └─▶ events on pods
//! ```
//!
//! Control groups of version 2 only. [`figures`] says when a container is about to be killed, [`guards`] what follows; `cgroup` has the files,
//! `run` the task. Whoever dies or stops leaves nothing behind: an agent that is told to stop takes its `memory.high` back, and one that was
//! killed is followed by one that knows them by their value.
mod cgroup;
pub mod figures;
pub mod guards;
mod run;

pub(crate) use cgroup::forget;
pub(crate) use run::{Parts, run};
