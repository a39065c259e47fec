//! Reads the node and pod lists of a trace.
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cleave_plan::placement::{Demand, THOUSANDTHS_PER_GPU};

/// A pod of the trace.
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) demand: Demand,
    /// Memory in MiB.
    pub(super) memory: u64,
    /// Seconds from creation to deletion, if the list has both times.
    pub(super) lifetime: Option<f64>,
}

/// A node of the trace, and its free capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) model: String,
    /// CPU in thousandths of a core.
    pub(super) cpu_total: u64,
    pub(super) cpu: u64,
    /// Memory in MiB.
    pub(super) memory_total: u64,
    pub(super) memory: u64,
    /// Free thousandths of each GPU.
    pub(super) gpus: Vec<u32>,
}

impl Host {
    /// Returns whether the pod fits the node's free CPU and memory and its GPU model. Ignores free
    /// GPUs.
    pub(super) fn has_cpu_memory_and_model_for(&self, pod: &Pod) -> bool {
        let models = &pod.demand.models;
        self.cpu >= pod.demand.cpu && self.memory >= pod.memory && (models.is_empty() || models.contains(&self.model))
    }

    /// Returns the sum of the free thousandths of all GPUs.
    pub(super) fn free_gpu_thousandths(&self) -> u32 {
        self.gpus.iter().sum()
    }
}

/// Reads the rows of a CSV file without quotes. Each row maps columns to values.
fn read_rows(path: &Path) -> Result<Vec<BTreeMap<String, String>>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().with_context(|| format!("{} is empty", path.display()))?.split(',').collect();
    let row = |line: &str| header.iter().map(ToString::to_string).zip(line.split(',').map(str::to_owned)).collect();
    Ok(lines.filter(|line| !line.is_empty()).map(row).collect())
}

/// Parses the number in a column.
fn parse_column<T: std::str::FromStr>(row: &BTreeMap<String, String>, column: &str) -> Result<T> {
    let text = row.get(column).with_context(|| format!("no column {column}"))?;
    text.parse().ok().with_context(|| format!("{column}: {text:?} is not a number"))
}

/// Reads the list of nodes.
pub(super) fn read_hosts(path: &Path) -> Result<Vec<Host>> {
    read_rows(path)?
        .iter()
        .map(|row| {
            let (cpu, memory) = (parse_column(row, "cpu_milli")?, parse_column(row, "memory_mib")?);
            Ok(Host {
                name: row.get("sn").context("no column sn")?.clone(),
                model: row.get("model").context("no column model")?.clone(),
                cpu_total: cpu,
                cpu,
                memory_total: memory,
                memory,
                gpus: vec![THOUSANDTHS_PER_GPU; parse_column(row, "gpu")?],
            })
        })
        .collect()
}

/// Reads the list of pods.
pub(super) fn read_pods(path: &Path) -> Result<Vec<Pod>> {
    read_rows(path)?
        .iter()
        .map(|row| {
            let mut models: Vec<String> = row
                .get("gpu_spec")
                .filter(|spec| !spec.is_empty())
                .map_or_else(Vec::new, |spec| spec.split('|').map(str::to_owned).collect());
            models.sort();
            let time = |column| parse_column::<f64>(row, column).ok();
            let demand = Demand {
                cpu: parse_column(row, "cpu_milli")?,
                gpus: parse_column(row, "num_gpu")?,
                per_gpu: parse_column(row, "gpu_milli")?,
                models,
            };
            ensure!(demand.per_gpu <= THOUSANDTHS_PER_GPU, "gpu_milli above {THOUSANDTHS_PER_GPU}");
            let lifetime = time("deletion_time").zip(time("creation_time")).map(|(end, start)| end - start);
            let memory = parse_column(row, "memory_mib")?;
            Ok(Pod { name: row.get("name").context("no column name")?.clone(), demand, memory, lifetime })
        })
        .collect()
}
