//! Changes to the machine.

use anyhow::{Context, Result, anyhow, bail, ensure};
use sim_machine::{
    ComputeMode, ContextKind, Error, EventKind, Fault, FaultEffect, Gpu, Machine, MigError, Model, Placement, State,
};

use crate::arguments::Command;

/// Applies a command that only changes the machine's state.
pub(crate) fn apply(machine: &Machine, command: Command) -> Result<()> {
    machine.update(|state| match command {
        Command::Xid { gpu, code, instance } => {
            let uuid = state.gpu(&gpu)?.uuid.clone();
            state.push_event(&uuid, EventKind::Xid, code, instance);
            Ok(())
        }
        Command::Ecc { gpu, uncorrected, corrected } => add_ecc_errors(state, &gpu, corrected, uncorrected),
        Command::Lose { gpu } => change_gpu(state, &gpu, |g, _| {
            g.lost = true;
            Ok(())
        }),
        Command::Remove { gpu } => change_gpu(state, &gpu, |g, _| {
            (g.lost, g.removed) = (true, true);
            Ok(())
        }),
        Command::Restore { gpu } => change_gpu(state, &gpu, |g, _| {
            (g.lost, g.removed) = (false, false);
            Ok(())
        }),
        Command::Reset { gpu, from_outside } => {
            let busy = !context_numbers_on(machine, state, &gpu)?.is_empty();
            let sessions = machine.open_sessions(Some(&state.gpu(&gpu)?.uuid), false);
            change_gpu(state, &gpu, |g, _| {
                ensure!(!busy || g.lost, "GPU {} is in use by processes", g.index);
                ensure!(sessions == 0 || from_outside, "GPU {} is in use: {sessions} NVML sessions are open", g.index);
                g.reset();
                Ok(())
            })?;
            // A lost GPU is reset even if processes use it, so end their contexts.
            let gone = context_numbers_on(machine, state, &gpu)?;
            state.processes.retain(|p| !gone.contains(&p.id));
            Ok(())
        }
        Command::Fail { call, gpu, code, count } => add_fault(state, call, gpu, FaultEffect::Code(code), count),
        Command::Hang { call, gpu, seconds, count } => add_fault(state, call, gpu, FaultEffect::Hang(seconds), count),
        Command::Clear { ids } => {
            if let Some(unknown) = ids.iter().find(|id| state.faults.iter().all(|f| f.id != **id)) {
                bail!("fault {unknown} does not exist");
            }
            state.faults.retain(|f| !ids.is_empty() && !ids.contains(&f.id));
            Ok(())
        }
        Command::Set { gpu, values } => {
            let is_ampere = state.model(state.gpu(&gpu)?)?.architecture == "Ampere";
            let sessions = machine.open_sessions(Some(&state.gpu(&gpu)?.uuid), false);
            let busy = !context_numbers_on(machine, state, &gpu)?.is_empty() || (is_ampere && sessions > 0);
            change_gpu(state, &gpu, |g, model| values.iter().try_for_each(|v| set_property(g, model, v, busy)))
        }
        Command::Driver { present, version, cuda } => {
            let driver = &mut state.driver;
            driver.present = present.unwrap_or(driver.present);
            driver.version = version.unwrap_or_else(|| driver.version.clone());
            driver.cuda = cuda.unwrap_or(driver.cuda);
            Ok(())
        }
        Command::Unload => {
            let sessions = machine.open_sessions(None, false);
            ensure!(sessions == 0, "module nvidia is in use: {sessions} NVML sessions are open");
            ensure!(machine.live_processes(state).is_empty(), "module nvidia is in use by processes");
            state.driver.present = false;
            Ok(())
        }
        Command::Reboot => {
            state.reboot();
            Ok(())
        }
        other => Err(anyhow!("{other:?} does not only change the state")),
    })
}

/// Returns the numbers of the contexts on a GPU and on its MIG devices whose processes still exist.
fn context_numbers_on(machine: &Machine, state: &State, gpu: &str) -> Result<Vec<u64>> {
    let uuid = &state.gpu(gpu)?.uuid;
    let here = |device: &str| state.device(device).is_some_and(|d| d.gpu.uuid == *uuid);
    Ok(machine.live_processes_where(state, |p| here(&p.device)).into_iter().map(|p| p.id).collect())
}

fn change_gpu(state: &mut State, gpu: &str, change: impl FnOnce(&mut Gpu, &Model) -> Result<()>) -> Result<()> {
    let model = state.model(state.gpu(gpu)?)?.clone();
    change(state.gpu_mut(gpu)?, &model)
}

fn add_ecc_errors(state: &mut State, gpu: &str, corrected: u64, uncorrected: u64) -> Result<()> {
    let gpu = state.gpu_mut(gpu)?;
    gpu.ecc = [gpu.ecc[0] + corrected, gpu.ecc[1] + uncorrected];
    let uuid = gpu.uuid.clone();
    if corrected > 0 {
        state.push_event(&uuid, EventKind::SingleBitEcc, 0, None);
    }
    if uncorrected > 0 {
        state.push_event(&uuid, EventKind::DoubleBitEcc, 0, None);
    }
    Ok(())
}

fn add_fault(
    state: &mut State,
    call: String,
    gpu: Option<String>,
    effect: FaultEffect,
    remaining: Option<u32>,
) -> Result<()> {
    let gpu = gpu.map(|name| device_uuid(state, &name)).transpose()?;
    if let FaultEffect::Hang(Some(seconds)) = effect {
        ensure!(seconds.is_finite() && seconds >= 0.0, "{seconds} is not a duration");
    }
    let id = state.next_id();
    state.faults.push(Fault { id, call, gpu, effect, remaining });
    println!("fault {id}");
    Ok(())
}

/// Returns the UUID of the GPU or MIG device that `name` identifies.
fn device_uuid(state: &State, name: &str) -> Result<String, Error> {
    match state.device(name) {
        Some(device) => Ok(device.uuid().to_owned()),
        None => Ok(state.gpu(name)?.uuid.clone()),
    }
}

fn set_property(gpu: &mut Gpu, model: &Model, change: &str, busy: bool) -> Result<()> {
    let (key, value) = change.split_once('=').with_context(|| format!("{change:?} is not KEY=VALUE"))?;
    match key {
        "compute-mode" => {
            ensure!(!gpu.mig, "a GPU in MIG mode only supports compute mode DEFAULT");
            gpu.compute_mode = match value.to_ascii_uppercase().replace('-', "_").as_str() {
                "DEFAULT" => ComputeMode::Default,
                "EXCLUSIVE_PROCESS" => ComputeMode::ExclusiveProcess,
                "PROHIBITED" => ComputeMode::Prohibited,
                _ => bail!("compute-mode must be DEFAULT, EXCLUSIVE_PROCESS or PROHIBITED, not {value}"),
            };
        }
        "mig" => match gpu.set_mig_mode(model, parse_switch(key, value)?, busy) {
            Err(later @ (MigError::InUse | MigError::ResetRequired)) => println!("pending: {later}"),
            other => other.with_context(|| format!("MIG on {}", model.name))?,
        },
        "mig-needs-reset" => gpu.mig_needs_reset = parse_switch(key, value)?,
        "remap-pending" => gpu.remap_pending = parse_switch(key, value)?,
        "remap-failed" => gpu.remap_failed = parse_switch(key, value)?,
        "recovery" => {
            gpu.recovery = match value {
                "none" => 0,
                "reset" => 1,
                "reboot" => 2,
                "drain-and-reset" => 4,
                _ => bail!("recovery must be none, reset, reboot or drain-and-reset, not {value}"),
            };
        }
        "persistence" => gpu.persistence = parse_switch(key, value)?,
        "numa" => gpu.numa_node = parse_number(key, value)?,
        "cpus" => value.clone_into(&mut gpu.cpus),
        "temperature" => gpu.temperature = parse_number(key, value)?,
        "utilization" => gpu.utilization = parse_number(key, value)?,
        "throttling" => gpu.throttling = parse_throttle_reasons(value)?,
        "energy" => gpu.energy_millijoules = parse_number(key, value)?.map_or(0, u64::from),
        _ => bail!(
            "{key}: known are compute-mode, mig, mig-needs-reset, persistence, numa, cpus, temperature, utilization, throttling, \
             energy, remap-pending, remap-failed and recovery"
        ),
    }
    Ok(())
}

fn parse_switch(key: &str, value: &str) -> Result<bool> {
    match value {
        "on" | "true" | "1" => Ok(true),
        "off" | "false" | "0" => Ok(false),
        _ => bail!("{key} must be on or off, not {value}"),
    }
}

/// Parses a list of reasons for low clocks to the bits `nvmlClocksThrottleReason…`. An empty list
/// sets no bits.
fn parse_throttle_reasons(list: &str) -> Result<u64> {
    list.split(',').filter(|name| !name.is_empty()).try_fold(0, |all, name| {
        let bit = match name {
            "power-cap" => 0x4,
            "hardware-slowdown" => 0x8,
            "sync-boost" => 0x10,
            "thermal" => 0x20,
            "hardware-thermal" => 0x40,
            "power-brake" => 0x80,
            _ => bail!(
                "throttling must be a list of power-cap, hardware-slowdown, sync-boost, thermal, hardware-thermal and \
                 power-brake, not {name}"
            ),
        };
        Ok(all | bit)
    })
}

fn parse_number(key: &str, value: &str) -> Result<Option<u32>> {
    if value.is_empty() {
        return Ok(None);
    }
    value.parse().map(Some).with_context(|| format!("{key} must be a number, not {value}"))
}

/// Creates a MIG device.
pub(crate) fn create_mig_device(machine: &Machine, gpu: &str, profile: &str, at: Option<u32>) -> Result<String> {
    machine.update(|state| {
        let model = state.model(state.gpu(gpu)?)?.clone();
        let found = model.gpu_profiles.iter().find(|p| p.name == profile);
        let found = found.with_context(|| format!("{} has no profile {profile}", model.name))?;
        let at = at.map(|start| Placement { start, size: found.size });
        let whole = model.compute_profiles(found.id).into_iter().find(|c| c.slices == found.slices);
        let whole = whole.context("the profile has no compute instance")?;
        let gpu = state.gpu_mut(gpu)?;
        let refused = format!("failed to create {profile} on GPU {}", gpu.index);
        let gi = gpu.create_gpu_instance(&model, found.id, at).context(refused)?;
        let ci = gpu.create_compute_instance(&model, gi, whole.id, None)?;
        let made = gpu.instances.iter().filter(|i| i.id == gi).flat_map(|i| &i.compute).find(|c| c.id == ci);
        let (made, uuid) = (made.map(|c| c.uuid.clone()).unwrap_or_default(), gpu.uuid.clone());
        state.push_event(&uuid, EventKind::MigConfigChange, 0, None);
        Ok(made)
    })
}

/// Destroys a MIG device and its GPU instance.
pub(crate) fn destroy_mig_device(machine: &Machine, uuid: &str) -> Result<()> {
    machine.update(|state| {
        let device = state.device(uuid).with_context(|| format!("{uuid} does not exist"))?;
        let (gi, ci) = device.mig.with_context(|| format!("{uuid} is not a MIG device"))?;
        let (gpu, gi, ci) = (device.gpu.uuid.clone(), gi.id, ci.id);
        let processes = machine.live_processes(state);
        let busy = |uuid: &str| processes.iter().any(|p| p.device == uuid);
        let target = state.gpu_mut(&gpu)?;
        target.destroy_compute_instance(gi, ci, busy).with_context(|| format!("failed to destroy {uuid}"))?;
        target.destroy_gpu_instance(gi).with_context(|| format!("failed to destroy the GPU instance of {uuid}"))?;
        state.push_event(&gpu, EventKind::MigConfigChange, 0, None);
        Ok(())
    })
}

/// Uses a GPU until this process is killed. Returns an error if the context is destroyed, for
/// example by a reboot of the machine.
pub(crate) fn use_gpu(machine: &Machine, gpu: &str, memory: u64, graphics: bool) -> Result<()> {
    let uuid = device_uuid(&*machine.snapshot()?, gpu)?;
    let kind = if graphics { ContextKind::Graphics } else { ContextKind::Compute };
    let context = machine.open_context(&uuid, kind, memory << 20)?;
    println!("holding {memory} MiB of {uuid}");
    loop {
        context.check_exists()?;
        let seen = machine.snapshot()?.generation;
        machine.wait_for_change(seen, std::time::Duration::from_secs(3600))?;
    }
}
