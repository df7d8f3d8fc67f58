"""Of timm: of every family (a module of `timm.models`) the smallest that makes ten classes.

Smallest by the numbers of parameters; at the smallest size of images of SIZES that it runs at,
else at its own. `_look_up` finds them all, which takes minutes, and prints CHOSEN.
"""

from __future__ import annotations

from foreign.model import Foreign, classes, cross_entropy, images

SIZES = (64, 128, 224)
CLASSES = 10
CHOSEN: dict[str, tuple[str, int]] = {
    "beit": ("beit_base_patch16_224", 224),
    "byoanet": ("halonet_h1", 256),
    "byobnet": ("test_byobnet", 64),
    "cait": ("cait_xxs24_224", 224),
    "coat": ("coat_tiny", 224),
    "convit": ("convit_tiny", 224),
    "convmixer": ("convmixer_768_32", 64),
    "convnext": ("test_convnext", 64),
    "cpubone": ("cpubone_nano", 64),
    "crossvit": ("crossvit_tiny_240", 64),
    "csatv2": ("csatv2", 64),
    "cspnet": ("cs3darknet_focus_s", 64),
    "cspnext": ("cspnext_tiny", 64),
    "davit": ("davit_tiny", 64),
    "deepseek_vit": ("deepseek_vit_412m", 224),
    "deit": ("deit_tiny_patch16_224", 224),
    "densenet": ("densenet121", 64),
    "dla": ("dla46x_c", 64),
    "dpn": ("dpn48b", 64),
    "edgenext": ("edgenext_xx_small", 64),
    "efficientformer": ("efficientformer_l1", 224),
    "efficientformer_v2": ("efficientformerv2_s0", 224),
    "efficientnet": ("test_efficientnet", 64),
    "efficientvim": ("efficientvim_m1", 64),
    "efficientvit_mit": ("efficientvit_b0", 64),
    "efficientvit_msra": ("efficientvit_m0", 64),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 64),
    "fasternet": ("fasternet_t0", 64),
    "fastvit": ("fastvit_t8", 64),
    "focalnet": ("focalnet_tiny_srf", 64),
    "gcvit": ("gcvit_xxtiny", 224),
    "ghostnet": ("ghostnet_050", 64),
    "hardcorenas": ("hardcorenas_b", 64),
    "hgnet": ("hgnetv2_b0", 64),
    "hiera": ("hiera_tiny_224", 224),
    "hieradet_sam2": ("sam2_hiera_tiny", 64),
    "hrnet": ("hrnet_w18_small", 64),
    "iformer": ("iformer_t", 64),
    "inception_next": ("inception_next_atto", 64),
    "inception_resnet_v2": ("inception_resnet_v2", 128),
    "inception_v3": ("inception_v3", 128),
    "inception_v4": ("inception_v4", 128),
    "lcnetv2": ("lcnetv2_small", 64),
    "levit": ("levit_128s", 224),
    "lowformer": ("lowformer_b0", 64),
    "mambaout": ("test_mambaout", 64),
    "maxxvit": ("test_coatnet", 160),
    "metaformer": ("poolformerv2_s12", 64),
    "mlp_mixer": ("gmlp_ti16_224", 224),
    "mobilenetv3": ("lcnet_035", 64),
    "mobilenetv5": ("mobilenetv5_base", 64),
    "mobilevit": ("mobilevit_xxs", 64),
    "mvitv2": ("mvitv2_tiny", 64),
    "naflexvit": ("naflexvit_base_patch16_parfac_gap", 64),
    "nasnet": ("nasnetalarge", 64),
    "nest": ("nest_tiny", 224),
    "nextvit": ("nextvit_small", 64),
    "nfnet": ("test_nfnet", 64),
    "pit": ("pit_ti_224", 224),
    "pnasnet": ("pnasnet5large", 64),
    "pvt_v2": ("pvt_v2_b0", 64),
    "qwen3_vit": ("qwen3_vit_88m", 64),
    "rdnet": ("rdnet_tiny", 64),
    "regnet": ("regnetx_002", 64),
    "repghost": ("repghostnet_050", 64),
    "repvit": ("repvit_m1", 64),
    "res2net": ("res2next50", 64),
    "resnest": ("resnest14d", 64),
    "resnet": ("test_resnet", 64),
    "resnetv2": ("resnetv2_18", 64),
    "rexnet": ("rexnet_100", 64),
    "selecsls": ("selecsls42", 64),
    "senet": ("legacy_seresnet18", 64),
    "sequencer": ("sequencer2d_s", 64),
    "shvit": ("shvit_s1", 64),
    "sknet": ("skresnet18", 64),
    "starnet": ("starnet_s050", 64),
    "swiftformer": ("swiftformer_xs", 64),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 224),
    "swin_transformer_v2": ("swinv2_tiny_window16_256", 256),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 224),
    "tiny_vit": ("tiny_vit_5m_224", 64),
    "tnt": ("tnt_s_legacy_patch16_224", 224),
    "tresnet": ("tresnet_m", 64),
    "twins": ("twins_svt_small", 64),
    "vgg": ("vgg11", 64),
    "visformer": ("visformer_tiny", 224),
    "vision_transformer": ("test_vit", 64),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 224),
    "vision_transformer_relpos": ("test_vit_relpos", 160),
    "vision_transformer_sam": ("samvit_base_patch16_224", 64),
    "vitamin": ("vitamin_small_224", 224),
    "volo": ("volo_d1_224", 224),
    "vovnet": ("ese_vovnet19b_slim_dw", 64),
    "xception": ("legacy_xception", 64),
    "xception_aligned": ("xception41", 64),
    "xcit": ("xcit_nano_12_p16_224", 64),
}


OPTIONS = {"xcit_nano_12_p16_224": "--microbatches 2"}
"""Of one sample, torch's BatchNorm computes wrong gradients where that of its output is strided."""


def names() -> list[str]:
    """One of every family."""
    return [name for name, _ in CHOSEN.values()]


def foreign(name: str) -> Foreign:
    """The model of a name."""
    import timm

    size = dict(CHOSEN.values())[name]
    return Foreign(
        lambda: timm.create_model(name, num_classes=CLASSES),
        images(size),
        cross_entropy,
        classes(CLASSES),
        4,
        OPTIONS.get(name, ""),
    )


def _look_up() -> None:
    import timm
    import torch

    for family in timm.list_modules():
        sizes = []
        for name in timm.list_models(module=family):
            try:
                with torch.device("meta"):
                    model = timm.create_model(name, num_classes=CLASSES)
                sizes.append((sum(p.numel() for p in model.parameters()), name))
            except Exception:  # not made on meta, or without classes: not in the choice
                continue
        for _, name in sorted(sizes)[:1]:
            model = timm.create_model(name, num_classes=CLASSES)
            own = model.default_cfg["input_size"][-1]
            for size in (*[s for s in SIZES if s < own], own):
                try:
                    if model(torch.randn(2, 3, size, size)).shape == (2, CLASSES):
                        print(f"    {family!r}: ({name!r}, {size}),", flush=True)
                        break
                except Exception:  # too small for it
                    continue
