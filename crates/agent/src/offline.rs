//! Files in place of the API server, for benchmarks, tests, and a node without a cluster.
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cleave_api::gpunode::GpuNodeStatus;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use crate::ending::Shutdown;
use crate::files::write_atomically;
use crate::node::{Object, Occurrence};
use crate::pods::PodObject;
use crate::serve::Counter;
use crate::tenants::tell::PodEvent;

/// Between looks at the spec.
const LOOK: Duration = Duration::from_millis(100);

/// A folder with a spec, a status and events.
#[derive(Debug, Clone)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// This folder, which must be there.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// The spec as it is now; its generation counts changes.
    pub(crate) fn read(&self, generation: i64) -> Object {
        match fs::read(self.0.join("spec.json")) {
            Err(_) => Object::Missing,
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(spec) => Object::Present(generation, spec),
                Err(error) => Object::Malformed(error.to_string()),
            },
        }
    }

    /// Whether it says which pods there are: none come otherwise.
    pub(crate) fn has_pods(&self) -> bool {
        self.pods().exists()
    }

    fn pods(&self) -> PathBuf {
        self.0.join("pods.json")
    }

    /// Follows the pods, a list of objects as the API server has them, for ever.
    pub(crate) async fn follow_pods(&self, node: &str, counter: &Counter) {
        let mut last = Vec::new();
        // Nobody shuts this node down but by its whole.
        let mut shutdown = Shutdown::default();
        loop {
            let text = fs::read(self.pods()).unwrap_or_default();
            if text != last {
                match serde_json::from_slice::<Vec<PodObject>>(&text) {
                    Ok(pods) => {
                        counter.departures.send_if_modified(|departures| {
                            let there = pods.iter().filter_map(PodObject::uid).cloned().collect();
                            let gone = departures.only(&there, Instant::now());
                            pods.iter().fold(gone, |changed, pod| {
                                pod.note_departure(node, departures, &mut shutdown) || changed
                            })
                        });
                        let mut names = counter.names.lock();
                        names.begin();
                        pods.iter().filter_map(PodObject::named).for_each(|(uid, pod)| names.put(uid, pod));
                        names.end();
                        drop(names);
                        counter.expect(|expected| {
                            let bound: Vec<_> = pods.iter().filter_map(|pod| pod.bound(node)).collect();
                            expected.only(&bound.iter().map(|pod| pod.uid.clone()).collect());
                            bound.into_iter().for_each(|pod| expected.pod(pod, Instant::now()));
                        });
                    }
                    Err(error) => tracing::warn!(%error, "pods.json says nothing"),
                }
                last = text;
            }
            sleep(LOOK).await;
        }
    }

    /// Follows the spec for ever.
    pub(crate) async fn follow(&self, first: Object, objects: mpsc::Sender<Object>) {
        let (mut last, mut generation) = (first, 1);
        loop {
            sleep(LOOK).await;
            let next = match (self.read(generation), &last) {
                (Object::Present(_, spec), Object::Present(_, before)) if spec != *before => {
                    Object::Present(generation + 1, spec)
                }
                (next, _) => next,
            };
            if next != last {
                if let Object::Present(of, _) = &next {
                    generation = *of;
                }
                if objects.send(next.clone()).await.is_err() {
                    return;
                }
                last = next;
            }
        }
    }

    /// Writes events of pods as they come, for ever.
    pub(crate) async fn write_pod_events(&self, mut events: mpsc::Receiver<PodEvent>) {
        while let Some(PodEvent { namespace, pod, uid, reason, note }) = events.recv().await {
            let line =
                serde_json::json!({ "pod": format!("{namespace}/{pod}"), "uid": uid, "reason": reason, "note": note });
            let file = fs::OpenOptions::new().create(true).append(true).open(self.0.join("pod-events.jsonl"));
            if let Err(error) = file.and_then(|mut file| writeln!(file, "{line}")) {
                tracing::warn!(%error, folder = %self.0.display(), "cannot write");
            }
        }
    }

    /// Writes the status as it changes, and events as they come, for ever.
    pub(crate) async fn write(
        &self,
        mut statuses: watch::Receiver<Option<GpuNodeStatus>>,
        mut occurrences: mpsc::Receiver<Occurrence>,
    ) {
        loop {
            let written = tokio::select! {
                // Cancel-safe: a change that is not taken is seen by the next call.
                changed = statuses.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let text = serde_json::to_vec_pretty(&*statuses.borrow_and_update()).unwrap_or_default();
                    write_atomically(&self.0.join("status.json"), &text)
                }
                // Cancel-safe: a message that is not taken stays in the channel.
                occurrence = occurrences.recv() => match occurrence {
                    Some(Occurrence { warning, reason, note, regarding, related: _ }) => {
                        let pod = regarding.map(|pod| format!("{}/{}", pod.namespace, pod.name));
                        let line = serde_json::json!({ "warning": warning, "reason": reason, "note": note, "pod": pod });
                        let file = fs::OpenOptions::new().create(true).append(true).open(self.0.join("events.jsonl"));
                        file.and_then(|mut file| writeln!(file, "{line}"))
                    }
                    None => return,
                },
            };
            if let Err(error) = written {
                tracing::warn!(%error, folder = %self.0.display(), "cannot write");
            }
        }
    }
}
