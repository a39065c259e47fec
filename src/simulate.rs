//! `cleave simulate`: try policies and pods on nodes that are only written down.
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use cleave_api::gpunode::{GpuNodeStatus, GpuStatus, Health, MigProfileStatus, MigStatus, SliceStatus};
use cleave_api::names::{MODE_WHOLE, RESOURCE_GPU};
use cleave_api::{GpuNode, GpuNodeSpec, SharingPolicy};
use cleave_operator::dry;
use cleave_operator::pods::{PodObject, claimant};
use cleave_operator::read::{Agent, NodeObject, Observed};
use cleave_plan::Quantity;
use cleave_plan::mig::built_in;
use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::plan::{Output, print, told};

/// Try policies before they are applied: who would run where, on GPUs cut into what, and who would not, and why.
#[derive(Debug, clap::Args)]
#[command(long_about = HELP)]
pub(crate) struct Args {
    /// YAML files; `-` is standard input.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How the result is printed.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

/// Kinds are written as in manifests.
const HELP: &str = "\
Try policies before they are applied: who would run where, on GPUs cut into what, and who would not, and why.

Everything is YAML, in any order and any number of files: SharingPolicy, Pod, Deployment, ReplicaSet, StatefulSet, Job, PriorityClass, Node
and GpuNode, as `kubectl get -o yaml` prints them, lists included. Pods wait in the order in which they are written. A node's GPUs are
those of the GpuNode of its name, or whole ones that are written into the Node:

  kind: Node
  metadata: {name: n1, labels: {zone: a}}
  gpus:
  - {model: NVIDIA A100-SXM4-40GB, memory: 40Gi, count: 4}

Nothing is asked of a cluster.

Example: cleave simulate policy.yaml pods.yaml nodes.yaml";

/// Prints what would be.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut world = World::default();
    for path in &args.files {
        let name = path.display();
        let text = read(path).with_context(|| format!("reading {name}"))?;
        world.add_text(&text).with_context(|| format!("in {name}"))?;
    }
    print(&told(&dry::dry_run(&world.observed()?)?, args.output)?)
}

fn read(path: &Path) -> std::io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        return std::io::stdin().read_to_string(&mut text).map(|_| text);
    }
    std::fs::read_to_string(path)
}

/// GPUs of a node, written down.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Gpus {
    model: String,
    memory: Quantity,
    #[serde(default = "one")]
    count: u32,
    #[serde(default)]
    sms: u32,
}

const fn one() -> u32 {
    1
}

/// GPUs that a node may have in a simulation.
const MAX_GPUS: u32 = 64;
/// Pods that one workload may have in a simulation.
const MAX_PODS: u64 = 100_000;

/// What was read.
#[derive(Default)]
struct World {
    observed: Observed,
    nodes: Vec<(NodeObject, Vec<Gpus>)>,
    gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
    pods: Vec<Value>,
    priorities: BTreeMap<String, i32>,
}

impl World {
    fn add_text(&mut self, text: &str) -> Result<()> {
        // A node named `n` is no boolean.
        let options = serde_saphyr::options! { strict_booleans: true };
        let documents: Vec<Value> =
            serde_saphyr::from_multiple_with_options(text, options).context("this is no YAML")?;
        documents.into_iter().filter(|document| !document.is_null()).try_for_each(|document| self.add(document))
    }

    fn add(&mut self, object: Value) -> Result<()> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, name) = (text("/kind"), text("/metadata/name"));
        let here = || format!("{kind} {name}");
        match kind.as_str() {
            "SharingPolicy" => {
                let policy: DeserializeGuard<SharingPolicy> = serde_json::from_value(object).with_context(here)?;
                self.observed.add_policy(&policy);
            }
            "Node" => {
                let gpus = object.get("gpus").cloned().unwrap_or_else(|| json!([]));
                let gpus = serde_json::from_value(gpus).context("gpus").with_context(here)?;
                self.nodes.push((serde_json::from_value(object).with_context(here)?, gpus));
            }
            "GpuNode" => self.gpu_nodes.push(serde_json::from_value(object).with_context(here)?),
            "PriorityClass" => {
                let value = object.get("value").and_then(Value::as_i64).and_then(|value| i32::try_from(value).ok());
                self.priorities.insert(name.clone(), value.with_context(|| format!("{} has no value", here()))?);
            }
            "Pod" => self.pods.push(object),
            "Deployment" | "ReplicaSet" | "StatefulSet" => {
                self.add_workload(&object, &name, "/spec/replicas").with_context(here)?;
            }
            "Job" => self.add_workload(&object, &name, "/spec/parallelism").with_context(here)?,
            _ if object.get("items").is_some_and(Value::is_array) => {
                let items = object.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
                items.into_iter().try_for_each(|item| self.add(item))?;
            }
            "" => bail!("an object has no kind"),
            // Manifests hold much else, none of which decides where a pod runs.
            _ => {}
        }
        Ok(())
    }

    /// The pods of a workload.
    fn add_workload(&mut self, object: &Value, name: &str, count: &str) -> Result<()> {
        let count = object.pointer(count).and_then(Value::as_u64).unwrap_or(1);
        ensure!(count <= MAX_PODS, "{count} pods are more than {MAX_PODS}");
        let template = object.pointer("/spec/template").cloned().context("it has no template")?;
        for index in 0..count {
            let mut pod = template.clone();
            let meta = json!({"name": format!("{name}-{index}"), "namespace": object.pointer("/metadata/namespace")});
            if let Some(fields) = pod.as_object_mut() {
                fields.insert("metadata".to_owned(), meta);
            }
            self.pods.push(pod);
        }
        Ok(())
    }

    /// The cluster that was written down: its agents are well, and its kubelets have told everything.
    fn observed(self) -> Result<Observed> {
        let Self { mut observed, nodes, gpu_nodes, pods, priorities } = self;
        for (node, gpus) in nodes {
            let name = node.name_any();
            ensure!(!observed.nodes.contains_key(&name), "there are two nodes named {name}");
            observed.add_node(&node);
            if gpus.is_empty() {
                continue;
            }
            let status = GpuNodeStatus {
                observed_generation: 1,
                agent_version: env!("CARGO_PKG_VERSION").to_owned(),
                gpus: listed(&name, &gpus).with_context(|| format!("Node {name}"))?,
                ..GpuNodeStatus::default()
            };
            let mut object = GpuNode::new(&name, GpuNodeSpec::default());
            object.status = Some(status);
            observed.add_gpu_node(&DeserializeGuard(Ok(object)));
        }
        for object in gpu_nodes {
            let name = object.name_any();
            if !observed.nodes.contains_key(&name) {
                let mut node = NodeObject::default();
                node.metadata.name = Some(name);
                observed.add_node(&node);
            }
            observed.add_gpu_node(&object);
        }
        for node in observed.nodes.values_mut().filter(|node| node.has_object()) {
            node.agent = Some(Agent { ready: true });
        }
        for value in pods {
            let class = value.pointer("/spec/priorityClassName").and_then(Value::as_str);
            let priority = class.and_then(|class| priorities.get(class)).copied();
            let mut pod: PodObject = serde_json::from_value(value).context("a pod")?;
            pod.spec.priority = pod.spec.priority.or(priority);
            pod.trim();
            observed.pods.extend(claimant(&pod));
        }
        Ok(observed)
    }
}

/// GPUs as an agent would tell them.
fn listed(node: &str, gpus: &[Gpus]) -> Result<Vec<GpuStatus>> {
    let mut all = Vec::new();
    for Gpus { model, memory, count, sms } in gpus {
        let memory_mib = memory
            .as_mebibytes()
            .filter(|&memory| memory > 0)
            .with_context(|| format!("{memory} is no memory of {model}"))?;
        let profile = |profile: cleave_plan::mig::Profile| MigProfileStatus {
            name: profile.name,
            memory_mib: profile.memory_mib,
            sms: profile.sms,
            size: profile.size,
            starts: profile.starts,
        };
        let mig = built_in(model, memory_mib)
            .map(|known| MigStatus { profiles: known.into_iter().map(profile).collect(), ..MigStatus::default() });
        for _ in 0..*count {
            let index = u32::try_from(all.len()).unwrap_or(u32::MAX);
            ensure!(index < MAX_GPUS, "it has more than {MAX_GPUS} GPUs");
            let uuid = format!("GPU-{node}-{index}");
            let slice = SliceStatus {
                device: uuid.clone(),
                resource: RESOURCE_GPU.to_owned(),
                total: 1,
                ..SliceStatus::default()
            };
            all.push(GpuStatus {
                uuid,
                index,
                model: model.clone(),
                memory_mib,
                sms: *sms,
                mig: mig.clone(),
                mode: MODE_WHOLE.to_owned(),
                slices: vec![slice],
                health: Health { healthy: true, ..Health::default() },
                ..GpuStatus::default()
            });
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = "
kind: Node
metadata: {name: n1, labels: {zone: a}}
status: {allocatable: {cpu: '8'}}
gpus:
- {model: NVIDIA A100-SXM4-40GB, memory: 40Gi, count: 2}
---
apiVersion: cleave.dev/v1alpha1
kind: SharingPolicy
metadata: {name: auto}
spec: {mode: Auto}
---
kind: Deployment
metadata: {name: small, namespace: team}
spec:
  replicas: 4
  template:
    spec:
      containers: [{resources: {limits: {nvidia.com/gpu-10gb: 1}}}]
---
kind: List
items:
- kind: Pod
  metadata: {name: big}
  spec: {priorityClassName: high, containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}
- kind: Pod
  metadata: {name: elsewhere}
  spec: {nodeSelector: {zone: b}, containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}
- kind: PriorityClass
  metadata: {name: high}
  value: 1000
- kind: ConfigMap
";

    fn simulated(text: &str, output: Output) -> Result<String> {
        let mut world = World::default();
        world.add_text(text)?;
        told(&dry::dry_run(&world.observed()?)?, output)
    }

    #[test]
    fn who_runs_where_is_printed_and_who_does_not_and_why() {
        let text = simulated(CLUSTER, Output::Text).unwrap();
        for line in [
            "1 of 2 GPUs changes:",
            "MPS: 4 × nvidia.com/gpu-10gb",
            "5 of 6 pods have a place.",
            "+ team/small-3: On n1, GPU ",
            "+ default/big: On n1, GPU ",
            "- default/elsewhere: No node can take it. n1: it does not have the label zone=b that the pod selects.",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
        let json: Value = serde_json::from_str(&simulated(CLUSTER, Output::Json).unwrap()).unwrap();
        assert_eq!(json["placements"].as_array().map(Vec::len), Some(5));
        assert!(json["writes"]["n1"]["gpus"].is_array());
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        for (text, part) in [
            ("kind: Node\nmetadata: {name: n}\ngpus: [{model: A, memory: lots}]", "lots is no memory of A"),
            ("kind: Node\nmetadata: {name: n}\ngpus: [{model: A, memory: 1Gi, cuont: 2}]", "cuont"),
            ("kind: Node\nmetadata: {name: n}\ngpus: [{model: A, memory: 1Gi, count: 65}]", "more than 64 GPUs"),
            ("kind: Node\nmetadata: {name: n}\n---\nkind: Node\nmetadata: {name: n}", "two nodes named n"),
            ("metadata: {}", "no kind"),
            ("a: [", "no YAML"),
            ("kind: Job\nmetadata: {name: j}\nspec: {parallelism: 1000000, template: {}}", "more than 100000"),
        ] {
            let error = format!("{:#}", simulated(text, Output::Text).unwrap_err());
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
        let policy = "kind: SharingPolicy\napiVersion: cleave.dev/v1alpha1\nmetadata: {name: p}\nspec: {mode: Mps, mps: {units: 49}}";
        let text = simulated(policy, Output::Text).unwrap();
        assert!(text.contains("Policy p means nothing: mps.units is 49"), "{text}");
    }
}
