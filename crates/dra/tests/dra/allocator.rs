//! Compares the model of the scheduler with Kubernetes' own allocator, and checks the slices with
//! the API server's own validation. `e2e/dra-allocator` runs Kubernetes' code.
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::LazyLock;

use cleave_dra::wire::{Attribute, Device, DeviceAllocation, ResourceSlice};
use cleave_dra::{ClaimPlan, Gpu, NodeName, Pool};
use cleave_plan::Quantity;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Value, json};

use crate::gpus::{self, any_gpus};
use crate::scheduler::{Amounts, Scheduler};

/// The device classes by the kind of device.
const KINDS: [&str; 6] = ["gpu", "mps", "mem", "timeslice", "mig", "mig-mps"];

/// Kubernetes' allocator as a process.
struct Allocator {
    process: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// Builds the program with Kubernetes' default version, or with the version in `CLEAVE_KUBERNETES`.
fn build() -> PathBuf {
    let version = std::env::var("CLEAVE_KUBERNETES").map_or_else(|_| String::new(), |name| format!("versions/{name}/"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dra-allocator");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/dra-allocator");
    // Use the build settings of the other Go programs, so that they share compiled packages.
    let built = Command::new("go")
        .args(["build", "-trimpath", "-buildvcs=false", "-o"])
        .arg(&program)
        .arg(format!("-modfile={version}go.mod"))
        .arg(".")
        .current_dir(source)
        .envs([("CGO_ENABLED", "0"), ("GOWORK", "off"), ("GOFLAGS", "")])
        .status()
        .expect("Go is installed");
    assert!(built.success(), "e2e/dra-allocator does not build");
    program
}

impl Allocator {
    /// Starts the program.
    fn start() -> Self {
        static PROGRAM: LazyLock<PathBuf> = LazyLock::new(build);
        let mut process =
            Command::new(&*PROGRAM).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
        let requests = process.stdin.take().expect("piped");
        let answers = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, requests, answers }
    }

    fn send(&mut self, request: &Value) -> Value {
        writeln!(self.requests, "{request}").expect("the program reads requests");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the program answers");
        serde_json::from_str(&answer).expect("an answer")
    }

    /// Replaces the slices, and returns why the API server refuses objects.
    fn replace(&mut self, slices: &[ResourceSlice]) -> Value {
        let class = |kind: &&str| {
            let expression = format!(
                "device.driver == 'gpu.cleave.dev' && device.attributes['gpu.cleave.dev'].?kind.orValue('') == '{kind}'"
            );
            json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
                "metadata": {"name": format!("{kind}.cleave.dev")},
                "spec": {"selectors": [{"cel": {"expression": expression}}]},
            })
        };
        let classes: Vec<Value> = KINDS.iter().map(class).collect();
        self.send(&json!({"node": "node1", "slices": slices, "classes": classes}))
    }

    /// Allocates `count` devices of a kind to a claim. Returns `None` if the claim does not fit.
    fn allocate(&mut self, claim: &str, kind: &str, count: u32, amounts: &Amounts) -> Option<DeviceAllocation> {
        let mut request = json!({"deviceClassName": format!("{kind}.cleave.dev"), "count": count});
        if !amounts.is_empty() {
            request["capacity"] = json!({"requests": amounts});
        }
        let answer = self.send(&json!({"allocate": {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": claim, "namespace": "team", "uid": "6ba7b810-9dad-11d1-80b4-00c04fd430c8"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
        }}));
        assert_eq!(answer["errors"], Value::Null);
        let devices = answer.get("allocation")?.get("devices")?.clone();
        Some(serde_json::from_value(devices).expect("an allocation"))
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn kind(device: &Device) -> &str {
    match &device.attributes["kind"] {
        Attribute::String(kind) => kind,
        other => panic!("{other:?}"),
    }
}

/// The amount that a claim requests: a whole number, and whether a half is added.
type Amount = (u64, bool);

/// One step of a history: allocate a claim of this kind, count and amount, or free a claim.
#[derive(Debug, Clone)]
enum Step {
    Allocate { kind: &'static str, count: u32, amount: Option<Amount> },
    Free(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let amount = (prop_oneof![4 => 1..12_u64, 1 => 0..200_u64], prop::bool::weighted(0.2));
    let amount = prop::option::of(amount);
    let count = prop_oneof![5 => Just(1_u32), 1 => Just(2)];
    let allocate = (prop::sample::select(KINDS.to_vec()), count, amount)
        .prop_map(|(kind, count, amount)| Step::Allocate { kind, count, amount });
    prop::collection::vec(prop_oneof![4 => allocate, 1 => any::<prop::sample::Index>().prop_map(Step::Free)], 1..40)
}

/// Returns the requested amounts of a claim.
fn amounts(kind: &str, amount: Option<Amount>) -> Amounts {
    let Some((whole, half)) = amount else { return Amounts::new() };
    let (name, quantity) = match kind {
        "mps" | "mig-mps" if half => ("units", format!("{whole}500m")),
        "mps" | "mig-mps" => ("units", whole.to_string()),
        // Instances are compared with the amount, and shares by memory consume the amount.
        "mem" | "mig" if half => ("memory", format!("{}Mi", whole * 1024 + 512)),
        "mem" | "mig" => ("memory", format!("{whole}Gi")),
        _ => return Amounts::new(),
    };
    Amounts::from([(name.to_owned(), Quantity::new(&quantity))])
}

fn history(allocator: &mut Allocator, pool: &Pool, steps: Vec<Step>) -> Result<usize, TestCaseError> {
    let slices = pool.slices(1);
    prop_assert_eq!(allocator.replace(&slices), json!({}));
    let mut model = Scheduler::new(&slices);
    let mut claims: Vec<(String, ClaimPlan, DeviceAllocation)> = Vec::new();
    let mut allocated = 0;
    for (number, step) in steps.into_iter().enumerate() {
        let (kind, count, amounts) = match step {
            Step::Free(_) if claims.is_empty() => continue,
            Step::Free(index) => {
                let (name, _, devices) = claims.remove(index.index(claims.len()));
                prop_assert_eq!(allocator.send(&json!({"free": name})), json!({}));
                for device in devices.results {
                    let at = model.allocated().iter().position(|one| *one == device).expect("allocated");
                    model.free(at);
                }
                continue;
            }
            Step::Allocate { kind, count, amount } => (kind, count, amounts(kind, amount)),
        };
        let expected = model
            .devices()
            .iter()
            .filter(|device| self::kind(device) == kind)
            .find_map(|device| model.try_device(device, &amounts));
        let name = format!("claim-{number}");
        let found = allocator.allocate(&name, kind, count, &amounts);
        if count == 1 {
            let consumed = |device: &cleave_dra::wire::AllocatedDevice| {
                let amounts = device.consumed_capacity.iter();
                amounts.map(|(name, amount)| (name.clone(), amount.milli())).collect::<Vec<_>>()
            };
            let found = found.as_ref().map(|found| (found.results[0].device.clone(), consumed(&found.results[0])));
            let expected = expected.as_ref().map(|one| (one.device.clone(), consumed(one)));
            prop_assert_eq!(found, expected, "{} {:?}", kind, amounts);
        }
        let Some(found) = found else { continue };
        for device in &found.results {
            model.allocate(device.clone());
        }
        match pool.read_claim(&found) {
            Ok(plan) => claims.push((name, plan, found)),
            // Shares with a count are refused on the node, but their devices are allocated.
            Err(error) => {
                prop_assert!(count > 1 && ["mps", "mem", "mig-mps"].contains(&kind), "{error}");
                prop_assert_eq!(allocator.send(&json!({"free": name})), json!({}));
                for _ in found.results {
                    model.free(model.allocated().len() - 1);
                }
                continue;
            }
        }
        prop_assert_eq!(pool.check(claims.iter().map(|(_, plan, _)| plan)), Ok(()));
        allocated += 1;
    }
    Ok(allocated)
}

#[test]
#[ignore = "builds Kubernetes' allocator with Go: make test runs it"]
fn kubernetes_accepts_the_slices_and_allocates_what_the_model_allocates() {
    let allocator = std::cell::RefCell::new(Allocator::start());
    let allocated = std::cell::Cell::new(0);
    let mut runner = TestRunner::new_with_rng(
        Config { failure_persistence: None, ..Config::default() },
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let result = runner.run(&(any_gpus(), steps()), |(gpus, steps)| {
        let (pool, _) = Pool::new(NodeName::new("node1").expect("valid"), gpus);
        let more = history(&mut allocator.borrow_mut(), &pool, steps)?;
        allocated.set(allocated.get() + more);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    assert!(allocated.get() > 500, "only {} allocations", allocated.get());
}

#[test]
#[ignore = "builds Kubernetes' allocator with Go: make test runs it"]
fn kubernetes_accepts_a_node_with_sixteen_gpus_and_allocates_each_once() {
    let mut allocator = Allocator::start();
    let model = "A model with a name of more than 64 characters, which NVML allows, \u{e9}";
    let gpu = |number| gpus::gpu(number, (model, 81_559), gpus::everything());
    let profiles = gpus::gpu(1, gpus::MODELS[3], gpus::everything()).profiles;
    let pool = gpus::pool((1..=16).map(|number| Gpu { profiles: profiles.clone(), ..gpu(number) }).collect());
    assert_eq!(allocator.replace(&pool.slices(1)), json!({}));
    let none = Amounts::new();
    for number in 0..16 {
        let kind = ["gpu", "mps", "mem", "timeslice"][number % 4];
        let amounts = amounts(kind, Some((if kind == "mps" { 10 } else { 79 }, false)));
        // Four replicas fill a GPU.
        let count = if kind == "timeslice" { 4 } else { 1 };
        for claim in 0..count {
            let found = allocator.allocate(&format!("claim-{number}-{claim}"), kind, 1, &amounts).expect("a free GPU");
            let gpu = format!("gpu-{:08x}", number + 1);
            assert!(found.results[0].device.starts_with(&gpu), "{found:?} is not of {gpu}");
        }
    }
    for kind in ["gpu", "mps", "mem", "timeslice", "mig"] {
        assert_eq!(allocator.allocate("claim", kind, 1, &none), None, "{kind}");
    }
}

#[test]
#[ignore = "builds Kubernetes' allocator with Go: make test runs it"]
fn kubernetes_refuses_slices_that_break_its_rules() {
    let mut allocator = Allocator::start();
    let pool = gpus::pool(vec![gpus::gpu(1, gpus::MODELS[3], gpus::everything())]);
    let slices = pool.slices(1);
    assert_eq!(allocator.replace(&slices), json!({}));
    let refused = |allocator: &mut Allocator, change: &dyn Fn(&mut Device)| {
        let mut slices = slices.clone();
        change(&mut slices[1].spec.devices[0]);
        allocator.replace(&slices)["errors"].to_string()
    };
    let version = refused(&mut allocator, &|device| device.name = "GPU-1".to_owned());
    assert!(version.contains("spec.devices[0].name"), "{version}");
    let step = refused(&mut allocator, &|device| {
        let policy = device.capacity.get_mut("units").and_then(|units| units.request_policy.as_mut()).expect("units");
        policy.valid_range.step = Some(Quantity::whole(10));
    });
    assert!(step.contains("one step"), "{step}");
}
