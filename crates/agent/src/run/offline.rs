//! Reads and writes files that replace the API server, for benchmarks, tests, and nodes without a
//! cluster.
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cleave_api::gpunode::GpuNodeStatus;
use tokio::sync::{mpsc, watch};

use super::api::forward_objects;
use super::input::Input;
use super::pods::NodePods;
use crate::event::{NodeEvent, PodEvent};
use crate::files::{replace_without_sync, watch_directory};
use crate::object::GpuNodeState;
use crate::pods::PodObject;
use crate::termination::shutdown::Shutdown;

/// Interval between reads of the spec and the pods while inotify does not work.
const FILE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A directory with the files of the spec, the status, the pods and the Events.
#[derive(Debug, Clone)]
pub(super) struct OfflineDirectory(PathBuf);

impl OfflineDirectory {
    /// Creates a handle for this directory. The directory must exist.
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Reads the spec. Returns the state of a `GpuNode` with this spec and generation.
    pub(super) fn read_spec(&self, generation: i64) -> GpuNodeState {
        match fs::read(self.0.join("spec.json")) {
            Err(_) => GpuNodeState::Missing,
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(spec) => GpuNodeState::Present(generation, spec),
                Err(error) => GpuNodeState::Malformed(error.to_string()),
            },
        }
    }

    /// Returns whether the directory contains a list of pods. The agent looks for the list only
    /// once, when it starts.
    pub(super) fn has_pods(&self) -> bool {
        self.pods_path().exists()
    }

    /// Returns the path of the list of pod objects.
    fn pods_path(&self) -> PathBuf {
        self.0.join("pods.json")
    }

    /// Notifies `changes` of each change of a file in the directory. Never returns.
    async fn watch_files(&self, changes: &watch::Sender<()>) {
        let unwatched = |error| {
            tracing::warn!(%error, directory = %self.0.display(), "failed to watch the offline directory; polling it");
        };
        watch_directory(&self.0, FILE_POLL_INTERVAL, || changes.send_replace(()), unwatched).await;
    }

    /// Reads the list of pod objects now and after each change of a file, until `changes` is
    /// closed.
    pub(super) async fn follow_pods(&self, node: &str, to: &NodePods, mut changes: watch::Receiver<()>) {
        let mut last = Vec::new();
        // Without an API server, the agent does not react to node shutdowns.
        let mut shutdown = Shutdown::default();
        loop {
            let text = fs::read(self.pods_path()).unwrap_or_default();
            if text != last {
                match serde_json::from_slice::<Vec<PodObject>>(&text) {
                    Ok(pods) => {
                        to.terminating.send_if_modified(|terminating| {
                            let current = pods.iter().filter_map(PodObject::uid).cloned().collect();
                            let gone = terminating.retain_listed(&current, Instant::now());
                            pods.iter().fold(gone, |changed, pod| {
                                pod.record_termination(node, terminating, &mut shutdown) || changed
                            })
                        });
                        let mut names = to.names.lock();
                        names.begin_list();
                        pods.iter().filter_map(PodObject::uid_and_names).for_each(|(uid, pod)| names.insert(uid, pod));
                        names.end_list();
                        drop(names);
                        to.allocator.update_pending(|pending| {
                            let bound: Vec<_> = pods.iter().filter_map(|pod| pod.bound_pod(node)).collect();
                            pending.retain_pods(&bound.iter().map(|pod| pod.uid.clone()).collect());
                            bound.into_iter().for_each(|pod| pending.update_pod(pod, Instant::now()));
                        });
                    }
                    Err(error) => tracing::warn!(%error, "failed to read pods.json"),
                }
                last = text;
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Reads the spec after each change of a file, until `changes` is closed.
    pub(super) async fn follow_spec(
        &self,
        first: GpuNodeState,
        objects: mpsc::Sender<GpuNodeState>,
        mut changes: watch::Receiver<()>,
    ) {
        let (mut last, mut generation) = (first, 1);
        while changes.changed().await.is_ok() {
            let next = match (self.read_spec(generation), &last) {
                (GpuNodeState::Present(_, spec), GpuNodeState::Present(_, before)) if spec != *before => {
                    GpuNodeState::Present(generation + 1, spec)
                }
                (next, _) => next,
            };
            if next != last {
                if let GpuNodeState::Present(of, _) = &next {
                    generation = *of;
                }
                if objects.send(next.clone()).await.is_err() {
                    return;
                }
                last = next;
            }
        }
    }

    /// Appends Events of pods to pod-events.jsonl, until the channel is closed.
    pub(super) async fn write_pod_events(&self, mut events: mpsc::Receiver<PodEvent>) {
        while let Some(PodEvent { namespace, pod, uid, reason, note }) = events.recv().await {
            let line =
                serde_json::json!({ "pod": format!("{namespace}/{pod}"), "uid": uid, "reason": reason, "note": note });
            if let Err(error) = append_line(&self.0.join("pod-events.jsonl"), &line) {
                tracing::warn!(%error, directory = %self.0.display(), "failed to write to the offline directory");
            }
        }
    }

    /// Writes the status whenever it changes, and appends Events to events.jsonl, until a channel
    /// is closed.
    pub(super) async fn write_status_and_events(
        &self,
        mut statuses: watch::Receiver<Option<GpuNodeStatus>>,
        mut events: mpsc::Receiver<NodeEvent>,
    ) {
        loop {
            let written = tokio::select! {
                // Cancel-safe: the next call returns a missed change.
                changed = statuses.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let text = serde_json::to_vec_pretty(&*statuses.borrow_and_update()).unwrap_or_default();
                    // Do not wait for a disk here, because the kubelet's calls use the same thread.
                    replace_without_sync(&self.0.join("status.json"), &text)
                }
                // Cancel-safe: an unreceived message remains in the channel.
                event = events.recv() => match event {
                    Some(NodeEvent { warning, reason, note, regarding, related: _ }) => {
                        let pod = regarding.map(|pod| format!("{}/{}", pod.namespace, pod.name));
                        let line = serde_json::json!({ "warning": warning, "reason": reason, "note": note, "pod": pod });
                        append_line(&self.0.join("events.jsonl"), &line)
                    }
                    None => return,
                },
            };
            if let Err(error) = written {
                tracing::warn!(%error, directory = %self.0.display(), "failed to write to the offline directory");
            }
        }
    }
}

/// Reads and writes the files. Never returns.
pub(super) async fn run(
    (spec, directory): (GpuNodeState, OfflineDirectory),
    node: String,
    pods: NodePods,
    inputs: mpsc::Sender<Input>,
    statuses: watch::Receiver<Option<GpuNodeStatus>>,
    (events, pod_events): (mpsc::Receiver<NodeEvent>, mpsc::Receiver<PodEvent>),
) -> anyhow::Result<()> {
    let (objects, read) = mpsc::channel(4);
    let (changes, pod_changes) = watch::channel(());
    let spec_changes = changes.subscribe();
    tokio::join!(
        directory.watch_files(&changes),
        directory.follow_spec(spec, objects, spec_changes),
        directory.follow_pods(&node, &pods, pod_changes),
        directory.write_status_and_events(statuses, events),
        directory.write_pod_events(pod_events),
        forward_objects(read, inputs),
    );
    Ok(())
}

/// Appends an object as a line to a file. Uses a single write, so that a concurrent reader sees
/// only whole lines.
fn append_line(path: &Path, object: &serde_json::Value) -> std::io::Result<()> {
    let mut file = fs::OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(format!("{object}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn the_spec_is_read_after_each_change_of_the_directory() {
        let files = tempfile::tempdir().unwrap();
        let directory = OfflineDirectory::new(files.path().to_owned());
        let spec = |plan: &str| fs::write(files.path().join("spec.json"), format!(r#"{{"planId":"{plan}"}}"#)).unwrap();
        spec("a");
        let first = directory.read_spec(1);
        // Change the spec before the watch starts. The agent must not miss the change.
        spec("b");
        let (objects, mut read) = mpsc::channel(4);
        let (changes, spec_changes) = watch::channel(());
        let follower = directory.clone();
        let task = tokio::spawn(async move {
            tokio::join!(follower.watch_files(&changes), follower.follow_spec(first, objects, spec_changes))
        });
        let mut until = async |condition: &dyn Fn(&GpuNodeState) -> bool| {
            let reading = async { while !condition(&read.recv().await.unwrap()) {} };
            tokio::time::timeout(TEST_TIMEOUT, reading).await.unwrap();
        };
        let has_plan = |plan: &'static str| move |object: &GpuNodeState| matches!(object, GpuNodeState::Present(_, spec) if spec.plan_id == plan);
        until(&has_plan("b")).await;
        spec("c");
        until(&has_plan("c")).await;
        fs::write(files.path().join("spec.json"), "{").unwrap();
        until(&|object| matches!(object, GpuNodeState::Malformed(_))).await;
        fs::remove_file(files.path().join("spec.json")).unwrap();
        until(&|object| matches!(object, GpuNodeState::Missing)).await;
        task.abort();
    }
}
