//! `cleave simulate --quotas`: tries quotas on GPUs and pods described in JSON.
//!
//! Amounts are tenths of a GPU. The input is untrusted: an error about an object names the object.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{
    Amount, GPU, Gang, Guarantee, Mode, Owner, Place, Pod, Quota, Rest, Settings, World, simulate,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The input. Unknown keys at the top level, such as descriptions, are ignored.
#[derive(Debug, Deserialize)]
struct QuotaFile {
    gpus: Vec<u64>,
    #[serde(default)]
    quotas: BTreeMap<String, Limits>,
    #[serde(default)]
    running: Vec<Value>,
    #[serde(default)]
    waiting: Vec<Value>,
}

/// The limits of a quota.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    #[serde(default)]
    min: u64,
    max: Option<u64>,
    lend: Option<u64>,
    weight: Option<i64>,
    #[serde(default)]
    guarantee: Guarantee,
    #[serde(default)]
    mode: Mode,
}

/// Optional properties of a pod.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "the flags of the format are independent")]
struct Flags {
    borrow: bool,
    protected: bool,
    preempts: bool,
    exempt: bool,
    /// Name and size of the pod's gang.
    gang: Option<(String, usize)>,
}

impl Default for Flags {
    fn default() -> Self {
        Self { borrow: true, protected: false, preempts: true, exempt: false, gang: None }
    }
}

/// Maximum number of GPUs, and maximum number of pods.
const MAX_ENTRIES: usize = 100_000;
/// Maximum amount of a quota, a pod or a GPU, in tenths of a GPU.
const MAX_TENTHS: u64 = 10_000_000;
/// Maximum number of passes of the simulation.
const MAX_PASSES: usize = 1000;
/// The name that stands for no quota in the rows of pods.
const NO_QUOTA: &str = "-";

/// Simulates the quotas of a JSON text, and returns the result as JSON.
///
/// # Errors
/// Returns an error if the text is not a description of quotas, or if the simulation does not end
/// within the maximum number of passes.
pub fn simulate_quotas(text: &str) -> Result<Value> {
    Ok(rest_json(&simulate(parse_world(text)?, MAX_PASSES, |_, _| {})?))
}

/// Parses GPUs, quotas and pods of a JSON text.
///
/// # Errors
/// Returns an error that names the invalid object if the text is not a description of quotas.
pub fn parse_world(text: &str) -> Result<World> {
    let file: QuotaFile = serde_json::from_str(text).context("not a description of quotas")?;
    file.into_world()
}

fn rest_json(rest: &Rest) -> Value {
    let leave: Vec<Value> =
        rest.leaves.iter().map(|leave| json!([format!("{:?}", leave.kind), leave.taker, leave.victims])).collect();
    let waits: BTreeMap<&str, &str> = rest.waits.iter().map(|(pod, wait)| (pod.as_str(), wait.name())).collect();
    json!({"leave": leave, "in": rest.within, "over": rest.over, "waits": waits})
}

impl QuotaFile {
    fn into_world(self) -> Result<World> {
        let Self { gpus, quotas, running, waiting } = self;
        ensure!(gpus.len() <= MAX_ENTRIES, "{} GPUs exceed the limit of {MAX_ENTRIES}", gpus.len());
        let count = running.len() + waiting.len();
        ensure!(count <= MAX_ENTRIES, "{count} pods exceed the limit of {MAX_ENTRIES}");
        let quotas: BTreeMap<String, Quota> = quotas
            .into_iter()
            .map(|(name, limits)| {
                ensure!(
                    name != NO_QUOTA,
                    "a quota cannot be named `{NO_QUOTA}`: this name stands for pods without a quota"
                );
                let quota = limits.to_quota().with_context(|| format!("quota {name}"))?;
                Ok((name, quota))
            })
            .collect::<Result<_>>()?;
        let gpus = gpus
            .into_iter()
            .enumerate()
            .map(|(index, size)| parse_amount(size).with_context(|| format!("GPU {index}")));
        let gpus: Vec<Amount> = gpus.collect::<Result<_>>()?;
        let mut pods = Vec::new();
        for (index, row) in running.into_iter().enumerate() {
            pods.push(parse_running_pod(row, &gpus, &quotas).with_context(|| format!("running pod {}", index + 1))?);
        }
        for (index, row) in waiting.into_iter().enumerate() {
            pods.push(parse_waiting_pod(row, &quotas).with_context(|| format!("waiting pod {}", index + 1))?);
        }
        let mut names = BTreeSet::new();
        for pod in &pods {
            ensure!(names.insert(&pod.name), "two pods are named {}", pod.name);
        }
        check_running_pods_fit(&gpus, &pods)?;
        let settings = Settings {
            min_runtime_fair_share: 0,
            min_runtime_reclaim: 0,
            budget_patience: None,
            ageing: None,
            max_preemptors: usize::MAX,
            ..Settings::default()
        };
        Ok(World { gpus, quotas, pods, settings })
    }
}

impl Limits {
    fn to_quota(&self) -> Result<Quota> {
        let optional = |tenths: Option<u64>| tenths.map(parse_amount).transpose();
        let quota =
            Quota::new(parse_amount(self.min)?).with_max(optional(self.max)?)?.with_lend(optional(self.lend)?)?;
        let quota = quota.with_weight(self.weight.unwrap_or(1))?.with_mode(self.mode);
        Ok(quota.with_guarantee(self.guarantee)?)
    }
}

fn parse_amount(tenths: u64) -> Result<Amount> {
    ensure!(tenths <= MAX_TENTHS, "{tenths} tenths of a GPU exceed the limit of {MAX_TENTHS}");
    Ok(Amount(tenths * GPU.0 / 10))
}

/// Checks that the running pods of each healthy GPU fit on the GPU.
fn check_running_pods_fit(gpus: &[Amount], pods: &[Pod]) -> Result<()> {
    let mut used = vec![Amount::ZERO; gpus.len()];
    for pod in pods {
        if let Place::Running { gpu, .. } = pod.place {
            used[gpu] = used[gpu].plus(pod.charge);
        }
    }
    for (index, (used, size)) in used.iter().zip(gpus).enumerate() {
        ensure!(
            *size == Amount::ZERO || used <= size,
            "GPU {index} has a size of {size} GPUs, and its pods use {used}"
        );
    }
    Ok(())
}

type RunningRow = (String, String, u64, i32, u64, usize);
type WaitingRow = (String, String, u64, i32, u64);

/// Parses a row. The last element may be an object with flags.
fn parse_row<T: serde::de::DeserializeOwned>(mut row: Value, columns: &str) -> Result<(T, Flags)> {
    let last = row.as_array_mut().and_then(|row| row.pop_if(|last| last.is_object()));
    let flags = last.map(serde_json::from_value).transpose().context("flags")?.unwrap_or_default();
    let parsed = serde_json::from_value(row).with_context(|| format!("the columns are {columns}"))?;
    Ok((parsed, flags))
}

fn parse_running_pod(row: Value, gpus: &[Amount], quotas: &BTreeMap<String, Quota>) -> Result<Pod> {
    let columns = "[name, quota, tenths of a GPU, priority, since, GPU, flags]";
    let ((name, quota, tenths, priority, since, gpu), flags): (RunningRow, Flags) = parse_row(row, columns)?;
    ensure!(gpu < gpus.len(), "{name} runs on GPU {gpu}, but there are {} GPUs, counted from 0", gpus.len());
    let place = Place::Running { gpu, since: Moment(since) };
    new_pod((name, quota, tenths, priority, since), place, flags, quotas)
}

fn parse_waiting_pod(row: Value, quotas: &BTreeMap<String, Quota>) -> Result<Pod> {
    let columns = "[name, quota, tenths of a GPU, priority, created, flags]";
    let (row, flags): (WaitingRow, Flags) = parse_row(row, columns)?;
    new_pod(row, Place::Waiting { nominated: None }, flags, quotas)
}

fn new_pod(row: WaitingRow, place: Place, flags: Flags, quotas: &BTreeMap<String, Quota>) -> Result<Pod> {
    let (name, quota, tenths, priority, created) = row;
    ensure!(!name.is_empty(), "a pod has no name");
    ensure!(tenths > 0, "{name} requests nothing");
    let owner = match (quota.as_str(), flags.exempt) {
        (NO_QUOTA, true) => Owner::Outside,
        (_, true) => bail!("{name} is exempt and has quota {quota}"),
        (NO_QUOTA, false) => Owner::Unnamed,
        _ if quotas.contains_key(&quota) => Owner::Quota(quota),
        _ => bail!("{name} has quota {quota}, which is not in quotas"),
    };
    Ok(Pod {
        charge: parse_amount(tenths).with_context(|| name.clone())?,
        name,
        owner,
        priority,
        created: Moment(created),
        place,
        borrows: flags.borrow,
        preempts: flags.preempts,
        protected: flags.protected.then_some(Moment(0)),
        gang: flags.gang.map(|(name, size)| Gang { name, size }),
        gpus: None,
        pieces: Vec::new(),
    })
}
