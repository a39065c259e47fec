//! `cleave simulate`: tries policies and pods on nodes described in YAML.
use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use cleave_api::gpunode::{GpuNodeStatus, GpuStatus, Health, MigProfileStatus, MigStatus, SliceStatus};
use cleave_api::names::{MODE_WHOLE, RESOURCE_GPU};
use cleave_api::{GpuNode, GpuNodeSpec, SharingPolicy};
use cleave_operator::dry_run;
use cleave_operator::pods::{PodObject, claimant};
use cleave_operator::read::{Agent, NodeObject, Observed};
use cleave_plan::Quantity;
use cleave_plan::mig::built_in;
use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::output::{self, OutputFormat, print, read_input};
use crate::plan::render;
use crate::quota_file::simulate_quotas;

/// The input format, in the help of `cleave simulate`.
pub(crate) const INPUT_HELP: &str = r#"Input:
  The files contain SharingPolicy, Pod, Deployment, ReplicaSet, StatefulSet,
  Job, PriorityClass, Node and GpuNode objects and Lists of them, as printed by
  `kubectl get -o yaml`. Other kinds are ignored. Pods arrive in the order of
  the files. A node has the GPUs of the GpuNode with the same name. Without such
  a GpuNode, the node has the whole GPUs that the Node object describes:

    kind: Node
    metadata: {name: n1, labels: {zone: a}}
    gpus:
    - {model: NVIDIA A100-SXM4-40GB, memory: 40Gi, count: 4}

Input of --quotas:
  One JSON object. Amounts are tenths of a GPU. `-` is the quota of pods without
  a quota. A GPU of size 0 is unhealthy. Passes run until nothing changes. A new
  waiting pod replaces each evicted pod at once. The result lists the evicted pods
  with their preemptors, the pods within a guarantee (in), the pods that borrow
  (over), and the reasons why other pods wait.

    {"gpus": [10, 10],
     "quotas": {"a": {"min": 10, "max": 20, "lend": 10, "weight": 1,
                      "guarantee": "Count", "mode": "Enforce"}},
     "running": [["a1", "a", 5, 0, 1, 0]],
     "waiting": [["a2", "a", 5, 0, 2, {"borrow": false}]]}

  A running pod has the columns name, quota, amount, priority, since and GPU. A
  waiting pod has the columns name, quota, amount, priority and created. Optional
  flags follow: borrow, protected (by a disruption budget), preempts, exempt, and
  gang with the gang's name and size: {"gang": ["trainer", 4]}.

Examples:
  cleave simulate policy.yaml pods.yaml nodes.yaml
  cleave simulate --quotas quotas.json
  kubectl get nodes,gpunodes -o yaml | cleave simulate policy.yaml -"#;

/// Options of `cleave simulate`.
#[derive(Debug, Clone, clap::Args)]
pub struct SimulateArgs {
    /// YAML files; `-` reads standard input.
    #[arg(required_unless_present = "quotas", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Try quotas on the GPUs and pods of a JSON file; `-` reads standard input. Prints JSON.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["files", "output"])]
    quotas: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
}

/// Runs `cleave simulate`.
pub(crate) fn run(args: &SimulateArgs) -> Result<()> {
    if let Some(path) = &args.quotas {
        let name = path.display();
        let text = read_input(path).with_context(|| format!("failed to read {name}"))?;
        return print(&output::to_json(&simulate_quotas(&text).with_context(|| name.to_string())?)?);
    }
    let mut input = SimulationInput::default();
    for path in &args.files {
        let name = path.display();
        let text = read_input(path).with_context(|| format!("failed to read {name}"))?;
        input.add_documents(&text).with_context(|| name.to_string())?;
    }
    print(&input.simulate(args.output)?)
}

/// Simulates the objects of a YAML stream and renders the result.
///
/// # Errors
/// Returns an error if the text is not valid YAML, two nodes have the same name, or an object is
/// malformed. Malformed policies are not errors: the result lists them.
pub fn simulate(text: &str, output: OutputFormat) -> Result<String> {
    let mut input = SimulationInput::default();
    input.add_documents(text)?;
    input.simulate(output)
}

/// The GPUs that a Node of the input describes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedGpus {
    model: String,
    memory: Quantity,
    #[serde(default = "default_gpu_count")]
    count: u32,
    #[serde(default)]
    sms: u32,
}

const fn default_gpu_count() -> u32 {
    1
}

/// Maximum number of GPUs of a described node.
const MAX_GPUS_PER_NODE: u32 = 64;
/// Maximum number of pods of one workload.
const MAX_PODS_PER_WORKLOAD: u64 = 100_000;

/// The objects of the input.
#[derive(Default)]
struct SimulationInput {
    observed: Observed,
    nodes: Vec<(NodeObject, Vec<DescribedGpus>)>,
    gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
    pods: Vec<Value>,
    priorities: BTreeMap<String, i32>,
}

impl SimulationInput {
    fn simulate(self, output: OutputFormat) -> Result<String> {
        render(&dry_run::dry_run(&self.into_observed()?)?, output)
    }

    fn add_documents(&mut self, text: &str) -> Result<()> {
        // Without this option, YAML 1.1 rules parse a name such as `n` as a boolean.
        let options = serde_saphyr::options! { strict_booleans: true };
        let documents: Vec<Value> =
            serde_saphyr::from_multiple_with_options(text, options).context("not valid YAML")?;
        documents.into_iter().filter(|document| !document.is_null()).try_for_each(|document| self.add_object(document))
    }

    fn add_object(&mut self, object: Value) -> Result<()> {
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
                items.into_iter().try_for_each(|item| self.add_object(item))?;
            }
            "" => bail!("an object in the input has no kind"),
            // Ignore objects of other kinds.
            _ => {}
        }
        Ok(())
    }

    /// Adds the pods of a workload. `count` is the JSON pointer to the number of pods.
    fn add_workload(&mut self, object: &Value, name: &str, count: &str) -> Result<()> {
        let count = object.pointer(count).and_then(Value::as_u64).unwrap_or(1);
        ensure!(count <= MAX_PODS_PER_WORKLOAD, "{count} pods exceed the limit of {MAX_PODS_PER_WORKLOAD}");
        let template = object.pointer("/spec/template").cloned().context("the workload has no spec.template")?;
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

    /// Returns the cluster that the objects describe. All agents are ready.
    fn into_observed(self) -> Result<Observed> {
        let Self { mut observed, nodes, gpu_nodes, pods, priorities } = self;
        for (node, gpus) in nodes {
            let name = node.name_any();
            ensure!(!observed.nodes.contains_key(&name), "two Nodes are named {name}");
            observed.add_node(&node);
            if gpus.is_empty() {
                continue;
            }
            let status = GpuNodeStatus {
                observed_generation: 1,
                agent_version: env!("CARGO_PKG_VERSION").to_owned(),
                gpus: reported_gpus(&name, &gpus).with_context(|| format!("Node {name}"))?,
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
        for node in observed.nodes.values_mut().filter(|node| node.has_gpu_node()) {
            node.agent = Some(Agent { ready: true });
        }
        for value in pods {
            let class = value.pointer("/spec/priorityClassName").and_then(Value::as_str);
            let priority = class.and_then(|class| priorities.get(class)).copied();
            let mut pod: PodObject = serde_json::from_value(value).context("malformed Pod")?;
            pod.spec.priority = pod.spec.priority.or(priority);
            pod.trim();
            observed.pods.extend(claimant(&pod));
        }
        Ok(observed)
    }
}

/// Returns the GPUs of a node, as an agent would report them.
fn reported_gpus(node: &str, gpus: &[DescribedGpus]) -> Result<Vec<GpuStatus>> {
    let mut all = Vec::new();
    for DescribedGpus { model, memory, count, sms } in gpus {
        let memory_mib = memory
            .as_mebibytes()
            .filter(|&memory| memory > 0)
            .with_context(|| format!("{memory} is not a memory size (GPU {model})"))?;
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
            ensure!(index < MAX_GPUS_PER_NODE, "more than {MAX_GPUS_PER_NODE} GPUs, the maximum for one node");
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
