//! Exports the functions for MIG: profiles, placements, GPU instances, compute instances and MIG
//! devices.

use std::ffi::c_uint;
use std::ptr::without_provenance_mut;

use nvml_wrapper_sys::bindings as sys;
use sim_machine::{ComputeProfile, DeviceRef, GpuProfile, Placement};

use super::raw::{In, Out, to_c_chars};
use super::{Return, exports, parse_switch, struct_version, to_u32};
use crate::library::{
    Code, Handle, HandleTarget, MachineView, Result, call_about_instance, call_on_device, call_on_gpu,
    call_on_gpu_as_root, catch_panic, handle_of, require_root,
};
use crate::mig;

exports! {
    nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, gpu, model| {
            if !model.is_mig_capable() {
                return Err(Code::NOT_SUPPORTED);
            }
            current.put(gpu.mig.into())?;
            pending.put(gpu.mig_pending.into())
        });
    nvmlDeviceSetMigMode(device: Handle, mode: c_uint, activation: Out<Return>) |own|
        call_on_gpu_as_root(own, device, |view, gpu, model| {
            let on = parse_switch(mode)?;
            if activation.is_null() {
                return Err(Code::INVALID_ARGUMENT);
            }
            if !model.is_mig_capable() {
                return Err(Code::NOT_SUPPORTED);
            }
            activation.put(mig::set_mig_mode(view, &gpu.uuid, on)?)
        });
    nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, gpu, model| count.put(mig::max_mig_devices(gpu, model)));
    nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, out: Out<Handle>) |own|
        call_on_gpu(own, device, |_, gpu, model| {
            if gpu.mig && index >= mig::max_mig_devices(gpu, model) {
                return Err(Code::INVALID_ARGUMENT);
            }
            let devices = mig::mig_devices(gpu);
            let (_, ci) = devices.get(index as usize).ok_or(Code::NOT_FOUND)?;
            out.put(handle_of(HandleTarget::Device(ci.uuid.clone())))
        });
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: Handle, out: Out<Handle>) |own| call_on_device(own, device, |_, d| {
        mig_instances_of(&d)?;
        out.put(handle_of(HandleTarget::Device(d.gpu.uuid.clone())))
    });
    nvmlDeviceGetGpuInstanceId(device: Handle, id: Out<c_uint>) |own|
        call_on_device(own, device, |_, d| id.put(mig_instances_of(&d)?.0.id));
    nvmlDeviceGetComputeInstanceId(device: Handle, id: Out<c_uint>) |own|
        call_on_device(own, device, |_, d| id.put(mig_instances_of(&d)?.1.id));
    nvmlDeviceGetAttributes(device: Handle, out: Out<sys::nvmlDeviceAttributes_t>) |own| put_attributes(own, device, out);
    nvmlDeviceGetAttributes_v2(device: Handle, out: Out<sys::nvmlDeviceAttributes_t>) |own| put_attributes(own, device, out);

    nvmlDeviceGetGpuInstanceProfileInfo(device: Handle, profile: c_uint, out: Out<sys::nvmlGpuInstanceProfileInfo_t>) |own|
        call_on_gpu(own, device, |_, _, model| {
            let p = mig::profile_by_index(model, profile)?;
            out.put(sys::nvmlGpuInstanceProfileInfo_t {
                id: p.id,
                isP2pSupported: p2p_capability(p),
                sliceCount: p.slices,
                instanceCount: p.instances,
                multiprocessorCount: p.sms,
                copyEngineCount: p.copy,
                decoderCount: p.decoders,
                encoderCount: p.encoders,
                jpegCount: p.jpeg,
                ofaCount: p.ofa,
                memorySizeMB: p.memory_mib,
            })
        });
    nvmlDeviceGetGpuInstanceProfileInfoV(device: Handle, profile: c_uint, out: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>) |own|
        call_on_gpu(own, device, |_, _, model| put_profile(mig::profile_by_index(model, profile)?, out));
    nvmlDeviceGetGpuInstanceProfileInfoByIdV(device: Handle, id: c_uint, out: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>) |own|
        call_on_gpu(own, device, |_, _, model| put_profile(mig::profile_by_id(model, id)?, out));
    nvmlDeviceGetGpuInstancePossiblePlacements(
        device: Handle, id: c_uint, out: Out<sys::nvmlGpuInstancePlacement_t>, count: Out<c_uint>,
    ) |own| put_placements(own, device, id, out, count);
    nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: Handle, id: c_uint, out: Out<sys::nvmlGpuInstancePlacement_t>, count: Out<c_uint>,
    ) |own| put_placements(own, device, id, out, count);
    nvmlDeviceGetGpuInstanceRemainingCapacity(device: Handle, id: c_uint, count: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, gpu, model| {
            count.put(gpu.remaining_capacity(model, mig::profile_by_id(model, id)?))
        });
    nvmlDeviceCreateGpuInstance(device: Handle, id: c_uint, out: Out<Handle>) |own|
        call_on_gpu_as_root(own, device, |view, gpu, _| create_gpu_instance(view, &gpu.uuid, id, None, out));
    nvmlDeviceCreateGpuInstanceWithPlacement(
        device: Handle, id: c_uint, at: In<sys::nvmlGpuInstancePlacement_t>, out: Out<Handle>,
    ) |own| call_on_gpu_as_root(own, device, |view, gpu, _| {
        let at = at.get()?;
        create_gpu_instance(view, &gpu.uuid, id, Some(Placement { start: at.start, size: at.size }), out)
    });
    nvmlDeviceGetGpuInstances(device: Handle, id: c_uint, out: Out<Handle>, count: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, gpu, model| {
            mig::profile_by_id(model, id)?;
            let instances = gpu.instances.iter().filter(|i| i.profile == id);
            put_all(instances.map(|i| handle_of(HandleTarget::GpuInstance(gpu.uuid.clone(), i.id))), out, count)
        });
    nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, out: Out<Handle>) |own| call_on_gpu(own, device, |_, gpu, model| {
        if !model.is_mig_capable() {
            return Err(Code::NOT_SUPPORTED);
        }
        let found = gpu.instances.iter().find(|i| i.id == id).ok_or(Code::NOT_FOUND)?;
        out.put(handle_of(HandleTarget::GpuInstance(gpu.uuid.clone(), found.id)))
    });
    nvmlGpuInstanceGetInfo(instance: Handle, out: Out<sys::nvmlGpuInstanceInfo_t>) |own|
        call_on_gpu_instance(own, instance, |view, gpu, id| {
            let (_, _, gi) = mig::find_gpu_instance(view, gpu, id)?;
            out.put(sys::nvmlGpuInstanceInfo_t {
                device: without_provenance_mut(handle_of(HandleTarget::Device(gpu.to_owned()))),
                id,
                profileId: gi.profile,
                placement: sys::nvmlGpuInstancePlacement_t { start: gi.placement.start, size: gi.placement.size },
            })
        });
    nvmlGpuInstanceDestroy(instance: Handle) |own| call_on_gpu_instance(own, instance, |view, gpu, id| {
        require_root()?;
        mig::find_gpu_instance(view, gpu, id)?;
        mig::destroy_gpu_instance(view, gpu, id)
    });

    nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: Handle, profile: c_uint, engine: c_uint, out: Out<sys::nvmlComputeInstanceProfileInfo_t>,
    ) |own| call_on_gpu_instance(own, instance, |view, gpu, id| {
        let (_, model, gi) = mig::find_gpu_instance(view, gpu, id)?;
        let p = mig::compute_profile_by_index(model, gi, profile, engine)?;
        let shared = model.gpu_profile(gi.profile).ok_or(Code::UNKNOWN)?;
        out.put(sys::nvmlComputeInstanceProfileInfo_t {
            id: p.id,
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.sms,
            sharedCopyEngineCount: shared.copy,
            sharedDecoderCount: shared.decoders,
            sharedEncoderCount: shared.encoders,
            sharedJpegCount: shared.jpeg,
            sharedOfaCount: shared.ofa,
        })
    });
    nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        instance: Handle, profile: c_uint, engine: c_uint, out: Out<sys::nvmlComputeInstanceProfileInfo_v2_t>,
    ) |own| call_on_gpu_instance(own, instance, |view, gpu, id| {
        let (_, model, gi) = mig::find_gpu_instance(view, gpu, id)?;
        let p = mig::compute_profile_by_index(model, gi, profile, engine)?;
        put_compute_profile(&p, model.gpu_profile(gi.profile).ok_or(Code::UNKNOWN)?, out)
    });
    nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance: Handle, profile: c_uint, count: Out<c_uint>) |own|
        call_on_gpu_instance(own, instance, |view, gpu, id| {
            let (gpu, model, gi) = mig::find_gpu_instance(view, gpu, id)?;
            let p = mig::compute_profile_by_id(model, gi, profile)?;
            let mut trial = gpu.clone();
            let fits = std::iter::from_fn(|| trial.create_compute_instance(model, id, p.id, None).ok()).count();
            count.put(to_u32(fits))
        });
    nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        instance: Handle, profile: c_uint, out: Out<sys::nvmlComputeInstancePlacement_t>, count: Out<c_uint>,
    ) |own| call_on_gpu_instance(own, instance, |view, gpu, id| {
        let (_, model, gi) = mig::find_gpu_instance(view, gpu, id)?;
        let (size, whole) = (mig::compute_profile_by_id(model, gi, profile)?.slices, model.gpu_profile(gi.profile));
        let last = whole.map_or(0, |p| p.slices).saturating_sub(size);
        put_all((0..=last).map(|start| sys::nvmlComputeInstancePlacement_t { start, size }), out, count)
    });
    nvmlGpuInstanceCreateComputeInstance(instance: Handle, profile: c_uint, out: Out<Handle>) |own|
        call_on_gpu_instance(own, instance, |view, gpu, id| create_compute_instance(view, gpu, id, profile, None, out));
    nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        instance: Handle, profile: c_uint, at: In<sys::nvmlComputeInstancePlacement_t>, out: Out<Handle>,
    ) |own| call_on_gpu_instance(own, instance, |view, gpu, id| {
        let at = at.get()?;
        create_compute_instance(view, gpu, id, profile, Some(Placement { start: at.start, size: at.size }), out)
    });
    nvmlGpuInstanceGetComputeInstances(instance: Handle, profile: c_uint, out: Out<Handle>, count: Out<c_uint>) |own|
        call_on_gpu_instance(own, instance, |view, gpu, id| {
            let (_, model, gi) = mig::find_gpu_instance(view, gpu, id)?;
            mig::compute_profile_by_id(model, gi, profile)?;
            let instances = gi.compute.iter().filter(|c| c.profile == profile);
            put_all(instances.map(|c| handle_of(HandleTarget::ComputeInstance(gpu.to_owned(), id, c.id))), out, count)
        });
    nvmlGpuInstanceGetComputeInstanceById(instance: Handle, id: c_uint, out: Out<Handle>) |own|
        call_on_gpu_instance(own, instance, |view, gpu, gi| {
            let (_, _, found) = mig::find_gpu_instance(view, gpu, gi)?;
            found.compute.iter().find(|c| c.id == id).ok_or(Code::NOT_FOUND)?;
            out.put(handle_of(HandleTarget::ComputeInstance(gpu.to_owned(), gi, id)))
        });
    nvmlComputeInstanceGetInfo(instance: Handle, out: Out<sys::nvmlComputeInstanceInfo_t>) |own|
        put_compute_info(own, instance, out);
    nvmlComputeInstanceGetInfo_v2(instance: Handle, out: Out<sys::nvmlComputeInstanceInfo_t>) |own|
        put_compute_info(own, instance, out);
    nvmlComputeInstanceDestroy(instance: Handle) |own| call_on_compute_instance(own, instance, |view, gpu, gi, id| {
        require_root()?;
        mig::find_gpu_instance(view, gpu, gi)?;
        mig::destroy_compute_instance(view, gpu, gi, id)
    });
}

/// Runs a call about a GPU instance. `body` receives the GPU's UUID and the id of the GPU instance.
fn call_on_gpu_instance(
    name: &str,
    instance: Handle,
    body: impl FnOnce(&MachineView, &str, u32) -> Result<()>,
) -> Return {
    catch_panic(|| {
        let (gpu, id) = mig::gpu_instance_of_handle(instance)?;
        call_about_instance(name, &gpu, |view| body(view, &gpu, id))
    })
}

/// Runs a call about a compute instance. `body` receives the GPU's UUID, the id of the GPU instance
/// and the id of the compute instance.
fn call_on_compute_instance(
    name: &str,
    instance: Handle,
    body: impl FnOnce(&MachineView, &str, u32, u32) -> Result<()>,
) -> Return {
    catch_panic(|| {
        let (gpu, gi, id) = mig::compute_instance_of_handle(instance)?;
        call_about_instance(name, &gpu, |view| body(view, &gpu, gi, id))
    })
}

fn mig_instances_of<'a>(
    device: &DeviceRef<'a>,
) -> Result<(&'a sim_machine::GpuInstance, &'a sim_machine::ComputeInstance)> {
    device.mig.ok_or(Code::INVALID_ARGUMENT)
}

fn p2p_capability(profile: &GpuProfile) -> u32 {
    profile.capabilities & sys::NVML_GPU_INSTANCE_PROFILE_CAPS_P2P
}

fn put_attributes(name: &str, device: Handle, out: Out<sys::nvmlDeviceAttributes_t>) -> Return {
    call_on_device(name, device, |_, d| {
        let (gi, ci) = d.mig.ok_or(Code::NOT_SUPPORTED)?;
        let whole = d.model.gpu_profile(gi.profile).ok_or(Code::UNKNOWN)?;
        let part = d.model.compute_profile(gi.profile, ci.profile).ok_or(Code::UNKNOWN)?;
        out.put(sys::nvmlDeviceAttributes_t {
            multiprocessorCount: part.sms,
            sharedCopyEngineCount: whole.copy,
            sharedDecoderCount: whole.decoders,
            sharedEncoderCount: whole.encoders,
            sharedJpegCount: whole.jpeg,
            sharedOfaCount: whole.ofa,
            gpuInstanceSliceCount: whole.slices,
            computeInstanceSliceCount: part.slices,
            memorySizeMB: whole.memory_mib,
        })
    })
}

/// Writes a GPU instance profile in the version of the structure that the caller requests. The
/// first field of the caller's structure contains the version.
fn put_profile(p: &GpuProfile, out: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>) -> Result<()> {
    type V2 = sys::nvmlGpuInstanceProfileInfo_v2_t;
    type V3 = sys::nvmlGpuInstanceProfileInfo_v3_t;
    let wanted = out.cast::<c_uint>().get()?;
    let name = to_c_chars(&format!("MIG {}", p.name));
    if wanted == struct_version::<V2>(2) {
        out.put(V2 {
            version: wanted,
            id: p.id,
            isP2pSupported: p2p_capability(p),
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.sms,
            copyEngineCount: p.copy,
            decoderCount: p.decoders,
            encoderCount: p.encoders,
            jpegCount: p.jpeg,
            ofaCount: p.ofa,
            memorySizeMB: p.memory_mib,
            name,
        })
    } else if wanted == struct_version::<V3>(3) {
        out.cast::<V3>().put(V3 {
            version: wanted,
            id: p.id,
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.sms,
            copyEngineCount: p.copy,
            decoderCount: p.decoders,
            encoderCount: p.encoders,
            jpegCount: p.jpeg,
            ofaCount: p.ofa,
            memorySizeMB: p.memory_mib,
            name,
            capabilities: p.capabilities,
        })
    } else {
        Err(Code::VERSION_MISMATCH)
    }
}

fn put_compute_profile(
    p: &ComputeProfile,
    shared: &GpuProfile,
    out: Out<sys::nvmlComputeInstanceProfileInfo_v2_t>,
) -> Result<()> {
    type V2 = sys::nvmlComputeInstanceProfileInfo_v2_t;
    type V3 = sys::nvmlComputeInstanceProfileInfo_v3_t;
    let wanted = out.cast::<c_uint>().get()?;
    let name = to_c_chars(&format!("MIG {}", p.name));
    if wanted == struct_version::<V2>(2) {
        out.put(V2 {
            version: wanted,
            id: p.id,
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.sms,
            sharedCopyEngineCount: shared.copy,
            sharedDecoderCount: shared.decoders,
            sharedEncoderCount: shared.encoders,
            sharedJpegCount: shared.jpeg,
            sharedOfaCount: shared.ofa,
            name,
        })
    } else if wanted == struct_version::<V3>(3) {
        out.cast::<V3>().put(V3 {
            version: wanted,
            id: p.id,
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.sms,
            sharedCopyEngineCount: shared.copy,
            sharedDecoderCount: shared.decoders,
            sharedEncoderCount: shared.encoders,
            sharedJpegCount: shared.jpeg,
            sharedOfaCount: shared.ofa,
            name,
            capabilities: 0,
        })
    } else {
        Err(Code::VERSION_MISMATCH)
    }
}

/// Writes a list. NVML requires that the caller's list has space for all instances or placements
/// of the profile. If the list is null, writes only the count.
fn put_all<T: Copy>(items: impl Iterator<Item = T>, out: Out<T>, count: Out<c_uint>) -> Result<()> {
    let mut written = 0;
    for item in items {
        if !out.is_null() {
            out.put_at(written, item)?;
        }
        written += 1;
    }
    count.put(to_u32(written))
}

fn put_placements(
    name: &str,
    device: Handle,
    id: u32,
    out: Out<sys::nvmlGpuInstancePlacement_t>,
    count: Out<c_uint>,
) -> Return {
    call_on_gpu(name, device, |_, _, model| {
        let p = mig::profile_by_id(model, id)?;
        put_all(p.starts.iter().map(|&start| sys::nvmlGpuInstancePlacement_t { start, size: p.size }), out, count)
    })
}

fn create_gpu_instance(
    view: &MachineView,
    gpu: &str,
    profile: u32,
    at: Option<Placement>,
    out: Out<Handle>,
) -> Result<()> {
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    out.put(mig::create_gpu_instance(view, gpu, profile, at)?)
}

fn create_compute_instance(
    view: &MachineView,
    gpu: &str,
    gi: u32,
    profile: u32,
    at: Option<Placement>,
    out: Out<Handle>,
) -> Result<()> {
    require_root()?;
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    mig::find_gpu_instance(view, gpu, gi)?;
    out.put(mig::create_compute_instance(view, gpu, gi, profile, at)?)
}

fn put_compute_info(name: &str, instance: Handle, out: Out<sys::nvmlComputeInstanceInfo_t>) -> Return {
    call_on_compute_instance(name, instance, |view, gpu, gi, id| {
        let (_, _, found) = mig::find_gpu_instance(view, gpu, gi)?;
        let ci = found.compute.iter().find(|c| c.id == id).ok_or(Code::NOT_FOUND)?;
        out.put(sys::nvmlComputeInstanceInfo_t {
            device: without_provenance_mut(handle_of(HandleTarget::Device(gpu.to_owned()))),
            gpuInstance: without_provenance_mut(handle_of(HandleTarget::GpuInstance(gpu.to_owned(), gi))),
            id,
            profileId: ci.profile,
            placement: sys::nvmlComputeInstancePlacement_t { start: ci.placement.start, size: ci.placement.size },
        })
    })
}
