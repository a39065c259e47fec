//! The task: woken by who is a client, by `memory.events` and by what comes of jobs.
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::cgroup::{Trees, change, is_gone};
use super::figures::Figures;
use super::guards::{Guards, Job, Told, Unread};
use crate::ending::process::Process;
use crate::ending::{Client, Ending, Key, Leaving, Outcome, terminate};
use crate::metrics::{Metrics, Termination};
use crate::mps::Link;
use crate::node::Occurrence;
use crate::tenants::cgroup::Owner;
use crate::tenants::names::Directory;
use crate::tenants::scene::Scene;
use crate::tenants::tell::PodEvent;

/// The file that says how often `memory.high` was exceeded.
const EVENTS: &str = "memory.events";

/// What the task is made of.
pub(crate) struct Parts {
    /// Where processes are.
    pub(crate) proc: PathBuf,
    /// The MPS host.
    pub(crate) link: Link,
    /// What the node knows: who is a client, and what its policy says.
    pub(crate) scene: watch::Receiver<Arc<Scene>>,
    /// The node's pods.
    pub(crate) names: Directory,
    /// Metrics.
    pub(crate) metrics: Metrics,
    /// What is told of the node.
    pub(crate) occurrences: mpsc::Sender<Occurrence>,
    /// What pods are told.
    pub(crate) tell: mpsc::Sender<PodEvent>,
}

/// Guards containers for ever.
pub(crate) async fn run(mut parts: Parts) -> anyhow::Result<()> {
    let proc = parts.proc.clone();
    let found = tokio::task::spawn_blocking(move || {
        let trees = Trees::find(&proc);
        let set = trees.set();
        (Arc::new(trees), set)
    });
    let (trees, set) = found.await.context("nobody looks for control groups")?;
    let mut watches = Watches::start();
    let mut guards = Guards::new(watches.stream.is_some());
    for (folder, owner, high) in set {
        tracing::info!(pod = owner.pod, %high, "an agent before this one has set memory.high");
        guards.adopt(folder, owner, high, Instant::now());
    }
    let mut known = Known::default();
    let mut ending = Ending::default();
    let (mut jobs, mut asked) = (JoinSet::new(), JoinSet::new());
    let mut changed = true;
    loop {
        let now = Instant::now();
        if std::mem::take(&mut changed) {
            let scene = Arc::clone(&parts.scene.borrow_and_update());
            guards.clients(known.wanted(&scene, &trees, &parts), now);
        }
        let decision = guards.decide(now);
        // Before the first look at a container: nothing is missed in between.
        watches.follow(&guards.folders());
        for (folder, job) in decision.jobs {
            let trees = Arc::clone(&trees);
            jobs.spawn_blocking(move || {
                let done = carry_out(&trees, &folder, job);
                (folder, job, done)
            });
        }
        decision.told.iter().for_each(|told| parts.tell(told));
        let ended = ending.decide(parts.doomed(&guards), now);
        for (client, why) in &ended.tell {
            parts.late(client, why);
        }
        for client in ended.terminate {
            asked.spawn(terminate(parts.link.clone(), client));
        }
        let again = [decision.again, ended.again].into_iter().flatten().min().map(tokio::time::Instant::from_std);
        tokio::select! {
            // All are cancel-safe: what is not taken is seen by the next call.
            told = parts.scene.changed() => {
                told.context("nobody tells who is a client any more")?;
                changed = true;
            }
            folder = watches.next() => guards.touched(&folder),
            Some(done) = jobs.join_next() => {
                let (folder, job, done) = done.context("a control group could not be looked at")?;
                let figures = done.map_err(|error| parts.unread(&folder, job, &error));
                guards.looked(&folder, job, figures, Instant::now());
            }
            Some(answer) = asked.join_next() => {
                let (client, outcome, began) = answer.context("ending a client failed")?;
                parts.ended(&client, &outcome, began);
                ending.answered(&client.key, &outcome, Instant::now());
                guards.answered(&client.key, &outcome);
            }
            () = async {
                match again {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            } => {}
        }
    }
}

/// Does what is to be done with a container's files, which may take the kernel a while, and looks at them.
fn carry_out(trees: &Trees, folder: &Path, job: Job) -> io::Result<Figures> {
    if let Job::Change { from, to } = job {
        change(folder, from, to)?;
    }
    trees.read(folder)
}

/// Of which container each client is, asked once.
#[derive(Default)]
struct Known {
    clients: BTreeMap<Key, Option<(PathBuf, Owner)>>,
    /// It was told that this machine cannot do it.
    told: bool,
}

impl Known {
    fn wanted(&mut self, scene: &Scene, trees: &Trees, parts: &Parts) -> BTreeMap<PathBuf, (Owner, BTreeSet<Key>)> {
        let mut before = std::mem::take(&mut self.clients);
        let mut wanted: BTreeMap<PathBuf, (Owner, BTreeSet<Key>)> = BTreeMap::new();
        for (device, shared) in scene.devices.iter().filter(|(_, shared)| shared.end_first) {
            for pid in shared.clients.keys().copied() {
                let key = Key { device: device.clone(), pid };
                let container = before.remove(&key).unwrap_or_else(|| trees.container(pid));
                match &container {
                    Some((folder, owner)) => {
                        let of = wanted.entry(folder.clone()).or_insert_with(|| (owner.clone(), BTreeSet::new()));
                        of.1.insert(key.clone());
                    }
                    None if Process::look(pid).is_some() && !std::mem::replace(&mut self.told, true) => {
                        parts.cannot(device, pid);
                    }
                    None => {}
                }
                self.clients.insert(key, container);
            }
        }
        wanted
    }
}

/// The containers' `memory.events`, as they change.
struct Watches {
    stream: Option<EventStream<[u8; 4096]>>,
    folders: BTreeMap<PathBuf, Option<WatchDescriptor>>,
}

impl Watches {
    fn start() -> Self {
        let stream = Inotify::init().and_then(|inotify| inotify.into_event_stream([0; 4096]));
        let stream = stream.inspect_err(|error| {
            tracing::warn!(%error, "containers' memory cannot be watched; looking at it instead");
        });
        Self { stream: stream.ok(), folders: BTreeMap::new() }
    }

    fn follow(&mut self, folders: &BTreeSet<&Path>) {
        let Some(stream) = &self.stream else { return };
        let mut watches = stream.watches();
        self.folders.retain(|folder, watch| {
            let stays = folders.contains(folder.as_path());
            if let Some(watch) = watch.take_if(|_| !stays) {
                // Where the container has ended the kernel has removed it.
                let _ = watches.remove(watch);
            }
            stays
        });
        for folder in folders {
            if !self.folders.contains_key(*folder) {
                let watch = watches.add(folder.join(EVENTS), WatchMask::MODIFY);
                let watch = watch.inspect_err(|error| {
                    tracing::debug!(%error, folder = %folder.display(), "a container's memory is not watched");
                });
                self.folders.insert(folder.to_path_buf(), watch.ok());
            }
        }
    }

    /// The container whose events have changed; cancel-safe.
    async fn next(&mut self) -> PathBuf {
        loop {
            let Some(stream) = &mut self.stream else { return std::future::pending().await };
            let event = stream.next().await;
            let Some(Ok(event)) = event else {
                // More than it can hold, or none at all: containers are looked at now and then in any case.
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                continue;
            };
            let of = |watch: &Option<WatchDescriptor>| watch.as_ref() == Some(&event.wd);
            if let Some((folder, _)) = self.folders.iter().find(|(_, watch)| of(watch)) {
                return folder.clone();
            }
        }
    }
}

impl Parts {
    /// The clients that are to be ended.
    fn doomed(&self, guards: &Guards) -> Vec<Client> {
        let client = |(key, owner, since): (&Key, &Owner, Instant)| {
            let Process { survives, stopped } = Process::look(key.pid)?;
            let leaving = Leaving::at_once(since);
            Some(Client { key: key.clone(), pod: self.pod(owner), leaving, survives, stopped })
        };
        guards.doomed().filter_map(client).collect()
    }

    /// `namespace/name`, or the UID of one that is not known.
    fn pod(&self, owner: &Owner) -> String {
        let names = self.names.lock();
        names.get(&owner.pod).map_or_else(|| owner.pod.clone(), |pod| format!("{}/{}", pod.namespace, pod.name))
    }

    fn unread(&self, folder: &Path, job: Job, error: &io::Error) -> Unread {
        if is_gone(error) {
            return Unread::Gone;
        }
        self.metrics.error("memory-high");
        tracing::warn!(%error, folder = %folder.display(), ?job, "a container's memory limits cannot be read or set");
        Unread::Failed
    }

    fn ended(&self, client: &Client, outcome: &Outcome, began: Instant) {
        let Client { key: Key { device, pid }, pod, leaving, .. } = client;
        let took_ms = began.elapsed().as_millis();
        let since_ms = leaving.since.elapsed().as_millis();
        match outcome {
            Outcome::Terminated => {
                self.metrics.terminated(Termination::Done);
                tracing::info!(
                    pod,
                    pid,
                    device,
                    took_ms,
                    since_ms,
                    "a client was ended: its container is out of memory"
                );
            }
            Outcome::Idle => tracing::debug!(pod, pid, device, "a client has no context to end"),
            Outcome::Failed(why) => {
                self.metrics.terminated(Termination::Failed);
                tracing::warn!(pod, pid, device, took_ms, since_ms, why, "a client could not be ended; trying again");
            }
        }
    }

    /// What came of an ending, on the pod.
    fn tell(&self, told: &Told) {
        let Told { owner, ended, left, held, max } = told;
        let pod = self.pod(owner);
        tracing::warn!(pod, ended, left, %held, limit = %max, "a container was about to be killed for its memory");
        if *ended == 0 {
            return;
        }
        let named = self.names.lock().get(&owner.pod).cloned();
        let Some(named) = named else { return };
        let container = owner.container.as_ref().and_then(|id| named.containers.get(id));
        let event = PodEvent {
            namespace: named.namespace,
            pod: named.name,
            uid: owner.pod.clone(),
            reason: "EndedBeforeOutOfMemory".into(),
            note: note(container.map_or("?", String::as_str), told),
        };
        if self.tell.try_send(event).is_err() {
            self.metrics.error("event-dropped");
        }
    }

    fn late(&self, client: &Client, why: &str) {
        let Client { key: Key { device, pid }, pod, .. } = client;
        self.metrics.terminated(Termination::Late);
        tracing::warn!(pod, pid, device, why, "a client is not ended, and its container is out of memory");
        let note = format!(
            "pod {pod} is about to be killed for its memory, and its process {pid} is not ended through MPS: {why}. Killed with work in flight, it \
             may break the other programs on {device}"
        );
        self.occurred("ClientNotEnded", note);
    }

    fn cannot(&self, device: &str, pid: u32) {
        tracing::warn!(
            device,
            pid,
            "the memory of a client's container cannot be limited: hostOutOfMemory has no effect"
        );
        let note = format!(
            "hostOutOfMemory: EndFirst has no effect here: process {pid}, which uses {device}, is of no container whose memory.high the agent can \
             set. It needs control groups of version 2"
        );
        self.occurred("EndFirstNotPossible", note);
    }

    fn occurred(&self, reason: &'static str, note: String) {
        let occurrence = Occurrence { warning: true, reason, note, regarding: None, related: None };
        if self.occurrences.try_send(occurrence).is_err() {
            self.metrics.error("event-dropped");
        }
    }
}

/// What a pod is told.
fn note(container: &str, told: &Told) -> String {
    let Told { ended, held, max, .. } = told;
    let programs = if *ended == 1 { "its program was".to_owned() } else { format!("{ended} programs of it were") };
    format!(
        "container {container} uses {held} of its memory limit of {max}, and was about to be killed for it: {programs} ended through MPS before \
         (CUDA error 810), because a program that is killed in the midst of its work breaks those that share the GPU. Give it more memory \
         (resources.limits.memory), or let it use less, for example by smaller batches or fewer loaders"
    )
}

#[cfg(test)]
mod tests {
    use super::super::figures::Bytes;
    use super::*;

    #[test]
    fn a_pod_is_told_what_to_do() {
        let owner = Owner { pod: "uid".into(), container: None };
        let told = Told { owner, ended: 1, left: 0, held: Bytes::mib(980), max: Bytes::mib(1024) };
        let text = note("main", &told);
        for part in ["container main", "980 MiB", "1024 MiB", "its program was ended", "resources.limits.memory"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(note("main", &Told { ended: 3, ..told }).contains("3 programs of it were ended"));
    }

    #[tokio::test]
    async fn a_container_is_told_of_as_its_events_change_and_no_more_when_it_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let folders = ["a", "b"].map(|name| root.path().join(name));
        for folder in &folders {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join(EVENTS), "high 0\n").unwrap();
        }
        let mut watches = Watches::start();
        let missing = root.path().join("c");
        watches.follow(&BTreeSet::from([folders[0].as_path(), &folders[1], &missing]));
        std::fs::write(folders[1].join(EVENTS), "high 1\n").unwrap();
        assert_eq!(watches.next().await, folders[1]);
        watches.follow(&BTreeSet::from([folders[0].as_path()]));
        std::fs::write(folders[1].join(EVENTS), "high 2\n").unwrap();
        std::fs::write(folders[0].join(EVENTS), "high 1\n").unwrap();
        // What of the other was told before it went may still come.
        assert_eq!(watches.next().await, folders[0]);
    }
}
