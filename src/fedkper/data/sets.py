"""The published MedMNIST sets: counts, class names, licences, addresses and checksums.

From the package medmnist 3.0.2; counts of 2.x: specification 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZES = (28, 64, 128, 224)
ADDRESS = "https://zenodo.org/records/10519652/files"
MEDMNIST = "MedMNIST v2: Yang et al., Scientific Data 10:41 (2023)"


@dataclass(frozen=True)
class Info:
    """Facts of one published set."""

    name: str
    modality: str
    classes: tuple[str, ...]
    channels: int
    counts: tuple[int, int, int]
    """Images of train, val, test in medmnist 3.0.2."""
    md5: dict[int, str]
    """Checksum of the official file of every image size."""
    source: str
    """Short citation of the source images."""
    licence: str = "CC BY 4.0"
    counts_2x: tuple[int, int, int] | None = None
    """Counts in medmnist 2.x where they differ."""
    ordinal: bool = False

    @property
    def citation(self) -> str:
        """The set and its source images, to cite where results are shown."""
        return f"{MEDMNIST}; source images: {self.source}"

    @property
    def task(self) -> str:
        """'binary', 'multi-class' or 'ordinal' (all are trained as single-label classification)."""
        return "ordinal" if self.ordinal else "binary" if len(self.classes) == 2 else "multi-class"

    def file(self, size: int = 28) -> str:
        """Name of the official file: bloodmnist.npz (28 x 28), bloodmnist_64.npz and so on."""
        return f"{self.name}.npz" if size == 28 else f"{self.name}_{size}.npz"

    def address(self, size: int = 28) -> str:
        """Public download address of the official file."""
        return f"{ADDRESS}/{self.file(size)}?download=1"

    def where(self, size: int = 28) -> str:
        """Address and checksum of the official file, for messages."""
        return f"public address {self.address(size)}, MD5 {self.md5[size]}"


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split("|"))


def _md5(digests: str) -> dict[int, str]:
    return dict(zip(SIZES, digests.split(), strict=True))


_KERMANY = "Kermany et al., Cell 172:1122-1131 (2018)"
_LITS = "Bilic et al., Medical Image Analysis 84:102680 (2023); Xu et al., IEEE TMI 38:1885-1898 (2019)"
_ORGANS = _split(
    "bladder|femur-left|femur-right|heart|kidney-left|kidney-right|liver|lung-left|lung-right|pancreas|spleen"
)

# One line per fact; the formatter would give every argument its own line.
# fmt: off
_TABLE = (
    Info("pathmnist", "colon pathology",
         _split("adipose|background|debris|lymphocytes|mucus|smooth muscle|normal colon mucosa|"
         "cancer-associated stroma|colorectal adenocarcinoma epithelium"),
         3, (89996, 10004, 7180),
         _md5("a8b06965200029087d5bd730944a56c1 55aa9c1e0525abe5a6b9d8343a507616 "
              "ac42d08fb904d92c244187169d1fd1d9 2c51a510bcdc9cf8ddb2af93af1eadec"),
         "Kather et al., PLOS Medicine 16:e1002730 (2019)"),
    Info("dermamnist", "dermatoscope",
         _split("actinic keratoses and intraepithelial carcinoma|basal cell carcinoma|"
         "benign keratosis-like lesions|dermatofibroma|melanoma|melanocytic nevi|vascular lesions"),
         3, (7007, 1003, 2005),
         _md5("0744692d530f8e62ec473284d019b0c7 b70a2f5635c6199aeaa28c31d7202e1f "
              "2defd784463fa5243564e855ed717de1 8974907d8e169bef5f5b96bc506ae45d"),
         "Tschandl et al., Scientific Data 5:180161 (2018); Codella et al., arXiv:1902.03368 (2019)",
         licence="CC BY-NC 4.0"),
    Info("octmnist", "retinal OCT",
         _split("choroidal neovascularization|diabetic macular edema|drusen|normal"), 1, (97477, 10832, 1000),
         _md5("c68d92d5b585d8d81f7112f81e2d0842 e229e9440236b774d9f0dfef9d07bdaf "
              "0a97e76651ace45c5d943ee3f65b63ae abc493b6d529d5de7569faaef2773ba3"),
         _KERMANY),
    Info("pneumoniamnist", "chest X-ray",
         _split("normal|pneumonia"), 1, (4708, 524, 624),
         _md5("28209eda62fecd6e6a2d98b1501bb15f 8f4eceb4ccffa70c672198ea285246c6 "
              "05b46931834c231683c68f40c47b2971 d6a3c71de1b945ea11211b03746c1fe1"),
         _KERMANY),
    Info("retinamnist", "fundus camera",
         _split("0|1|2|3|4"), 3, (1080, 120, 400),
         _md5("bd4c0672f1bba3e3a89f0e4e876791e4 afda852cc34dcda56f86ad2b2457dbcc "
              "e48e916a24454daf90583d4e6efb1a18 eae7e3b6f3fcbda4ae613ebdcbe35348"),
         "DeepDRiD: Liu et al., Patterns 3:100512 (2022)", ordinal=True),
    Info("breastmnist", "breast ultrasound",
         _split("malignant|normal, benign"), 1, (546, 78, 156),
         _md5("750601b1f35ba3300ea97c75c52ff8f6 742edef2a1fd1524b2efff4bd7ba9364 "
              "363e4b3f8d712e9b5de15470a2aaadf1 b56378a6eefa9fed602bb16d192d4c8b"),
         "Al-Dhabyani et al., Data in Brief 28:104863 (2020)"),
    Info("bloodmnist", "blood cell microscope",
         _split("basophil|eosinophil|erythroblast|"
         "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)|lymphocyte|monocyte|"
         "neutrophil|platelet"),
         3, (11959, 1712, 3421),
         _md5("7053d0359d879ad8a5505303e11de1dc 2b94928a2ae4916078ca51e05b6b800b "
              "adace1e0ed228fccda1f39692059dd4c b718ff6835fcbdb22ba9eacccd7b2601"),
         "Acevedo et al., Data in Brief 30:105474 (2020)"),
    Info("tissuemnist", "kidney cortex microscope",
         _split("Collecting Duct, Connecting Tubule|Distal Convoluted Tubule|Glomerular endothelial cells|"
         "Interstitial endothelial cells|Leukocytes|Podocytes|Proximal Tubule Segments|"
         "Thick Ascending Limb"),
         1, (165466, 23640, 47280),
         _md5("ebe78ee8b05294063de985d821c1c34b 123ece2eba09d0aa5d698fda57103344 "
              "61b955355d7425a89687b06cca3ce0c2 b077128c4a949f0a4eb01517f9037b9c"),
         "BBBC051: Ljosa et al., Nature Methods 9:637 (2012); Woloshuk et al., Cytometry A 99:707-721 (2021)",
         licence="CC BY 4.0 (source images CC BY 3.0)"),
    Info("organamnist", "abdominal CT, axial",
         _ORGANS, 1, (34561, 6491, 17778),
         _md5("68e3f8846a6bd62f0c9bf841c0d9eacc 2dcccc29b88e6da5a01161ef20cda288 "
              "eeae80d0a227a8d099027e1b3cfd3b60 50747347e05c87dd3aaf92c49f9f3170"),
         _LITS),
    Info("organcmnist", "abdominal CT, coronal",
         _ORGANS, 1, (12975, 2392, 8216),
         _md5("b9ceb9546e10131b32923c5bbeaea2b1 3ce34a8724ea6f548e6db4744d03b6a9 "
              "773c1f009daa3fe5d9a2a201b2a7ed94 050f5e875dc056f6768abf94ec9995d1"),
         _LITS, counts_2x=(13000, 2392, 8268)),
    Info("organsmnist", "abdominal CT, sagittal",
         _ORGANS, 1, (13932, 2452, 8827),
         _md5("9ab87b696fb54e2a387ebe992d6ed5f1 53a6d115339d874c25e309a994ff46d3 "
              "ded0c5fa01a95dc4978b956f613e9b8e b354719e553fbbb2513d5533f52a4cb1"),
         _LITS, counts_2x=(13940, 2452, 8829)),
)
# fmt: on

SETS: dict[str, Info] = {info.name: info for info in _TABLE}
"""Every published set, by its name."""

_VOLUMES = "its images are 3-D volumes; fedkper reads 2-D images"
REFUSED: dict[str, str] = {
    "chestmnist": "it is multi-label (14 findings per image); fedkper needs exactly one class per image",
    **{
        f"{part}mnist3d": _VOLUMES for part in ("organ", "nodule", "adrenal", "fracture", "vessel", "synapse")
    },
}
"""Published sets that cannot be used, and why."""

FILES: dict[str, tuple[Info, int]] = {info.file(size)[:-4]: (info, size) for info in _TABLE for size in SIZES}
"""(set, image size) by the name of its file, without the ending."""
